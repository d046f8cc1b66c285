"""What crosses between devices, on every compiler: gradients the `data` axis once per step, outside the loops over
microbatches and layers; the stream the `tensor` axis by gathers and scatters, so that each device holds its part."""

import platform
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.experimental import topologies

from jaxlm import sharding
from jaxlm.costs.hardware import Target
from jaxlm.lowering import targets
from jaxlm.training.step import jit_steps, make_steps

COLLECTIVE = re.compile(r"\s(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?((?:%?[\w.-]+(?:, )?)+)")
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def collectives(text: str) -> tuple[list[str], list[str]]:
    """The lines (inside loops, and outside them) of a compiled program's text that send between devices."""
    lines: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[1]
        lines.setdefault(name, []).append(line)
    called = {
        name: {callee.lstrip("%") for line in body for m in CALLED.finditer(line) for callee in m[1].split(", ")}
        for name, body in lines.items()
    }
    looping, waiting = set(), re.findall(r"body=%?([\w.-]+)", text)
    while waiting:
        name = waiting.pop()
        if name not in looping:
            looping.add(name)
            waiting += called.get(name, ())
    inside, outside = [], []
    for name, body in lines.items():
        (inside if name in looping else outside).extend(line for line in body if COLLECTIVE.search(line))
    return inside, outside


def groups(line: str) -> list[list[int]]:
    """Which devices, by their place in the mesh, a collective joins; one group of all where it names none."""
    if match := LISTED.search(line):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := COUNTED.search(line):
        shape = [int(n) for n in match[3].split(",")]
        order = [int(n) for n in match[4].split(",")] if match[4] else range(len(shape))
        return np.arange(np.prod(shape)).reshape(shape).transpose(order).reshape(int(match[1]), -1).tolist()
    raise AssertionError(f"groups in an unknown syntax: {line}")


def training_step(mesh, dtype: str, context: int = tiny.CONTEXT, **model) -> str:
    """The text of a compiled step of four microbatches on a mesh, perhaps of devices that are not here."""
    training = tiny.training(dtype=dtype, microbatches=4, batch=32, sequence=context)
    steps = make_steps(tiny.model(context=context, **model), training, tiny.optimization())
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(steps.init),
        steps.shardings(mesh),
    )
    lies = sharding.sharding(("batch", "sequence"), (32, context), mesh)
    names = ("tokens", "targets", "segments", "positions")
    batch = {name: jax.ShapeDtypeStruct((32, context), jnp.int32, sharding=lies) for name in names}
    with jax.set_mesh(mesh):
        return jit_steps(steps, mesh).train.lower(state, batch).compile().as_text()


# Where programs for TPU and CUDA can be compiled without either.
elsewhere = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="its compilers are for Linux on x86-64"
)


@pytest.fixture
def tpu(monkeypatch):
    """Devices of a TPU topology."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is no machine to ask
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return lambda name, **more: topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices


@pytest.fixture(scope="module")
def four_h200():
    return targets.devices(Target.parse("h200-sxm:4"))


MESHES = [(4, 1, 1), (2, 2, 1), (2, 1, 2)]


def check(mesh: tuple[int, int, int], devices, dtype: str) -> None:
    inside, outside = collectives(training_step(sharding.make_mesh(*mesh, devices), dtype))
    beneath = mesh[1] * mesh[2]  # devices of one place on the data axis, which is outermost
    assert bool(inside) == (beneath > 1)
    crossing = [line for line in inside if any(len({n // beneath for n in group}) > 1 for group in groups(line))]
    assert not crossing
    assert any("all-reduce" in line for line in outside)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_on_cpu(mesh):
    check(mesh, jax.devices(), "float32")


@pytest.mark.slow
@elsewhere
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_on_tpu(mesh, tpu):
    check(mesh, tpu("v5e:2x2"), "bfloat16")


@pytest.mark.slow
@elsewhere
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_on_cuda(mesh, four_h200):
    check(mesh, four_h200, "bfloat16")


@pytest.mark.slow
@elsewhere
def test_the_stream_is_gathered_and_scattered_on_cuda(four_h200):
    """Forward: in a layer two gathers, and two sums of which each device keeps its part; one such sum behind the
    embedding and a gather before the unembedding. Backward: their transposes. No [B, T, D] is summed whole."""
    inside, _ = collectives(training_step(sharding.make_mesh(1, 1, 4, four_h200), "bfloat16"))
    kinds = [COLLECTIVE.search(line)[1] for line in inside if re.search(r"\[\d+,\d+,32\]", line)]
    assert sorted(kinds) == ["all-gather"] * 6 + ["reduce-scatter"] * 6


@pytest.mark.slow
@elsewhere
def test_the_stream_is_gathered_and_scattered_on_tpu(tpu):
    """There, a sum of which each device keeps its part is an all-reduce in a fusion of that name."""
    text = training_step(sharding.make_mesh(1, 1, 4, tpu("v5e:2x2")), "bfloat16", context=512, width=256)
    whole = re.compile(r"= bf16\[\d+,512,256\]\S* all-reduce\(")
    computation, outside = "", []
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            computation = match[1]
        if whole.search(line) and not computation.startswith("all-reduce-scatter"):
            outside.append(line)
    assert "all-reduce-scatter" in text and not outside


@elsewhere
@pytest.mark.slow
def test_two_slices_of_a_tpu_are_joined_by_data(tpu):
    mesh = sharding.make_mesh(2, 2, 2, tpu("v5e:2x2", num_slices=2))
    assert [{device.slice_index for device in part.flat} for part in mesh.devices] == [{0}, {1}]


@elsewhere
@pytest.mark.slow
def test_an_axis_that_shares_links_of_the_torus_is_said(tpu):
    with pytest.warns(UserWarning, match="a mesh of 1 × 8 × 8 axes share links"):
        sharding.make_mesh(1, 8, 8, tpu("v5p:4x4x4"))
