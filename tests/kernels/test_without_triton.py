"""Kernels where JAX no longer lowers Pallas to Triton: as the next versions of JAX, which this one plays."""

import functools
import math
import platform
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from matrices import sampled
from numerics import check, served

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import hlo, launched_kernels, targets
from kernels_pallas import flash_attention, grouped_matmul, paged_attention, rms_norm, rotary_embedding
from kernels_pallas.core import choice, interpreted, launch, target
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.flash_attention import causal, sliding_window
from kernels_pallas.paged_attention import kernel_on

TRITON = "jax.experimental.pallas.triton"


@pytest.fixture(autouse=True)
def no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, TRITON, None)  # an import fails
    monkeypatch.delattr(pl, "triton", raising=False)
    for cached in (launch.has_triton, choice._say):
        cached.cache_clear()
    jax.clear_caches()
    yield
    monkeypatch.undo()
    launch.has_triton.cache_clear()
    jax.clear_caches()


def traced(function, kind, *shapes):
    """Return the jaxpr of a function of bfloat16 arrays on a chip, as text, and the warnings."""
    device = AbstractDevice(kind, 132, "gpu")
    mesh = AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=device)
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = str(jax.make_jaxpr(function)(*structs))
    return text, [str(w.message) for w in caught if w.category is RuntimeWarning]


def test_rows_take_mosaic_gpu_on_hopper_without_a_word():
    text, said = traced(rms_norm, "NVIDIA H200", (16, 1024))
    assert "gpu_block" in text and not said
    text, said = traced(jax.grad(lambda x: rms_norm(x).sum()), "NVIDIA H200", (16, 4096))
    assert "rms_norm_backward" in text and "gpu_block" in text and not said


@pytest.mark.parametrize("kind, page, mosaic_gpu", [("NVIDIA H200", 128, True), ("NVIDIA H200", 96, False)])
def test_pages_take_mosaic_gpu_on_hopper(kind, page, mosaic_gpu):
    query, key, value = (2, 1, 8, 128), (5, 2, 128, page), (5, 2, page, 128)
    table, end = jnp.ones((2, 3), jnp.int32), jnp.full((2, 1), 100)
    attend = functools.partial(paged_attention, table=table, key_range=(jnp.zeros_like(end), end))
    text, said = traced(attend, kind, query, key, value)
    assert ("gpu_block" in text) == mosaic_gpu and bool(said) != mosaic_gpu
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (query, key, value)]
    assert kernel_on(target.of_kind("gpu", kind), *structs) == ("mosaic_gpu" if mosaic_gpu else None)


@pytest.mark.parametrize("kind, width, mosaic_gpu", [("NVIDIA H200", 64, True), ("NVIDIA H200", 40, False)])
def test_groups_take_mosaic_gpu_on_hopper(kind, width, mosaic_gpu):
    """Forward, and in the gradients of rows and of matrices."""
    loss = functools.partial(_sum_of_groups, sizes=jnp.asarray([3, 0, 7], jnp.int32))
    text, said = traced(jax.grad(loss, (0, 1)), kind, (16, 64), (3, 64, width))
    assert text.count("mpmd_map") // 3 == mosaic_gpu and bool(said) != mosaic_gpu


def _sum_of_groups(x, matrices, sizes):
    return grouped_matmul(x, matrices, sizes).sum()


@pytest.mark.parametrize(
    "kind, function, shape",
    [
        ("NVIDIA A100-SXM4-80GB", rms_norm, (16, 1024)),
        ("NVIDIA B200", rms_norm, (16, 1024)),
        ("NVIDIA H200", rms_norm, (16, 300)),
    ],
    ids=["Ampere", "Blackwell", "odd width"],
)
def test_where_no_kernel_is_left_one_line_says_so(kind, function, shape):
    for expected in (1, 0):  # once in a process
        text, said = traced(function, kind, shape)
        assert "pallas_call" not in text and "gpu_block" not in text
        assert len(said) == expected
        assert not said or said[0].startswith(f"rms_norm: JAX {jax.__version__} does not lower Pallas to Triton, and")
        assert not said or said[0].endswith(kind)


@pytest.mark.parametrize(
    "kind, mask, chosen",
    [
        ("NVIDIA H100 80GB HBM3", functools.partial(sliding_window, before=20), ["mosaic_gpu"] * 2),
        ("NVIDIA A100-SXM4-80GB", causal, ["cudnn", "xla"]),  # whose gradients are not deterministic
        ("NVIDIA A100-SXM4-80GB", functools.partial(sliding_window, before=20), ["xla"] * 2),
        ("NVIDIA B200", causal, ["cudnn", "xla"]),
    ],
)
def test_attention_takes_cudnn_or_xla_with_one_line(kind, mask, chosen, monkeypatch):
    took, module = [], sys.modules["kernels_pallas.flash_attention"]
    plain = choice.choose
    monkeypatch.setattr(module, "choose", lambda *a, **o: took.append(plain(*a, **o)) or took[-1])
    monkeypatch.setattr(module.cudnn, "is_absent", lambda: None)
    monkeypatch.setattr(module.cudnn, "flash_attention", lambda operands, *rest: operands.query)
    _, said = traced(lambda x: flash_attention(x, x, x, key_range=mask(128)), kind, (1, 128, 2, 64))
    assert took == chosen and len(said) == (took[0] != "mosaic_gpu")


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compiler is for Linux on x86-64"
)
def test_pages_are_gathered_at_once_on_ampere():
    """In at most 12 launches for a layer; a loop would have as many for each page."""
    mesh = Mesh(np.array(targets.devices(Target.parse("a100-sxm4-80g:1"))), ("one",))
    shapes = [(8, 1, 32, 128), (129, 8, 128, 128), (129, 8, 128, 128), (8, 16), (8, 1), (8, 1)]
    dtypes = [*["bfloat16"] * 3, *["int32"] * 3]
    whole = NamedSharding(mesh, PartitionSpec())
    structs = [jax.ShapeDtypeStruct(*each, sharding=whole) for each in zip(shapes, dtypes, strict=True)]

    @jax.jit
    def attend(query, key, value, table, start, end):
        return paged_attention(query, key, value, table, key_range=(start, end))

    with jax.set_mesh(mesh), pytest.warns(RuntimeWarning, match="paged_attention: JAX .* does not lower"):
        program = hlo.parse(attend.lower(*structs).compile().as_text())
    launches = launched_kernels.kernels(program)
    assert sum(each.count for each in launches) <= 12
    assert not any(i.opcode == "while" for part in program.computations.values() for i in part.instructions.values())
    pages = 2 * math.prod([8, 16, 8, 128, 128 + 128])
    assert 3 * pages < sum(each.bytes for each in launches) < 3.3 * pages  # read, written and read, and scores


SAMPLES = [
    pytest.param(operation, *served(operation, name)[0], name, id=f"{operation.name}-{name}")
    for operation in OPERATIONS.values()
    for name in operation.implementations
    if name != "triton"
]


@pytest.mark.parametrize(
    "operation, case, dtype, implementation",
    sampled(SAMPLES, ["rms_norm-mosaic_gpu", "bias_activation-mosaic_tpu"]),
)
def test_other_kernels_need_no_triton(operation, case, dtype, implementation):
    check(operation, case, dtype, implementation)


@pytest.mark.parametrize("function", [rms_norm, lambda x, **o: rotary_embedding(x, x[:, 0, :8], x[:, 0, :8], **o)])
@interpreted()
def test_triton_by_name_is_refused_with_the_reason(function):
    with pytest.raises(
        NotImplementedError, match=f"triton cannot serve this call: JAX {jax.__version__} does not lower"
    ):
        function(jnp.ones((4, 2, 16)), implementation="triton")
