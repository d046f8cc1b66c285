"""Counts of whole functions: meshes, scopes and phases, and the products of XLA's compiled program."""

import math
import re
import subprocess
import sys
import time
import tomllib
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec
from matrices import sampled

from jaxlm.costs.counted.drawing import draw_work
from jaxlm.costs.jaxpr.count import count, count_jaxpr
from jaxlm.inference.cache_memory import CacheSize
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.ragged_step import DrawRows, NextTokens
from jaxlm.inference.requests import GREEDY, Sampling
from jaxlm.inference.sampling import row_sampling
from jaxlm.inference.settings import EngineSettings
from jaxlm.inference.step_shapes import TILE, StepShape
from jaxlm.lowering import hlo
from jaxlm.lowering.loops import program_flops
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.parallel.partition import named_sharding
from jaxlm.training.step import TrainStep
from kernels_pallas.paged_attention.costs import block_trips, loop_name


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


MODELS = Path(__file__).parents[3] / "configs" / "models"


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def test_shard_map_counts_every_shard():
    def fn(x, w):
        return lax.psum(x @ w, "tensor")

    def mapped(x, w):
        specs = PartitionSpec("data", "tensor"), PartitionSpec("tensor")
        return jax.shard_map(fn, mesh=mesh_of(data=2, tensor=4), in_specs=specs, out_specs=PartitionSpec("data"))(x, w)

    cost = count(mapped, f32(16, 8), f32(8, 8))
    assert cost.matmul_flops == 2 * 16 * 8 * 8
    (sent,) = cost.collectives
    assert sent == ("all-reduce", ("tensor",), 1, 8 * (8 * 8 * 4))  # [8, 8] float32 on each of eight shards
    assert cost.matmul_flops + cost.reduction_flops == cost.flops


def test_shard_map_over_some_axes_and_inside_another():
    mesh = mesh_of(data=2, tensor=4)

    def over_data(x, w):
        return jax.shard_map(
            jnp.matmul, mesh=mesh, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec("data"),
            axis_names={"data"},
        )(x, w)  # fmt: skip

    assert count(over_data, f32(16, 8), f32(8, 8)).matmul_flops == 2 * 16 * 8 * 8

    def both(x, w):
        def inner(x, w):
            return jax.shard_map(
                jnp.matmul, in_specs=(PartitionSpec("tensor"), PartitionSpec()), out_specs=PartitionSpec("tensor"),
                axis_names={"tensor"},
            )(x, w)  # fmt: skip

        return jax.shard_map(
            inner, mesh=mesh, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec("data"),
            axis_names={"data"},
        )(x, w)  # fmt: skip

    assert count(both, f32(16, 8), f32(8, 8)).matmul_flops == 2 * 16 * 8 * 8


def test_collectives_by_kind():
    def fn(x):
        x = lax.psum_scatter(lax.all_gather(x, "data", tiled=True), "data", tiled=True)
        return lax.ppermute(x, "data", [(0, 1), (1, 0)])

    def mapped(x):
        spec = PartitionSpec("data")
        f = jax.shard_map(fn, mesh=mesh_of(data=2), in_specs=spec, out_specs=spec, check_vma=False)
        return lax.fori_loop(0, 3, lambda i, x: f(x), x)

    each = 3 * 2 * (4 * 8 * 4)
    assert count(mapped, f32(8, 8)).collectives == (
        ("all-gather", ("data",), 3, each),
        ("collective-permute", ("data",), 3, each),
        ("reduce-scatter", ("data",), 3, 2 * each),
    )


def kernel(cost):
    def body(x, y):
        y[...] = x[...] * 2

    return pl.pallas_call(body, out_shape=f32(4, 8), interpret=True, name="doubled", cost_estimate=cost)


def test_pallas_kernels_count_what_they_state():
    stated = pl.CostEstimate(flops=32, transcendentals=5, bytes_accessed=300)
    cost = count(kernel(stated), f32(4, 8))
    assert (cost.flops, cost.kernel_flops) == (37, 37)
    assert (cost.bytes_in, cost.bytes_out) == (300 - 128, 128)
    assert cost["doubled"].flops == 37
    looped = count(lambda x: lax.fori_loop(0, 3, lambda i, x: kernel(stated)(x), x), f32(4, 8))
    assert looped.flops == 3 * 37
    with pytest.raises(ValueError, match="kernel doubled states no cost"):
        count(kernel(None), f32(4, 8))


def test_an_unknown_primitive_is_named():
    cost = count(jnp.fft.fft, jax.ShapeDtypeStruct((8,), jnp.complex64))
    assert cost.assumed == ("fft",) and cost.flops == 8
    assert "assumed of fft" in str(cost)


def test_scopes_and_phases():
    def layer(x, w):
        with jax.named_scope("outer"):
            with jax.named_scope("product"):
                y = x @ w
            return jnp.sin(y)

    def loss(w, x):
        return jnp.sum(lax.scan(lambda x, _: (jax.checkpoint(layer)(x, w), None), x, None, length=3)[0])

    cost = count(jax.vmap(jax.value_and_grad(loss), (None, 0)), f32(8, 8), f32(4, 2, 8))
    one = 4 * 2 * 2 * 8 * 8
    product = cost["outer/product"]
    assert set(cost.children) == {"outer"} and set(cost["outer"].children) == {"product"}
    assert product.forward.matmul_flops == 3 * one
    assert product.backward.matmul_flops == 6 * one
    assert product.rematerialised.matmul_flops == 3 * one
    assert cost.of(phase="backward", kind="matmul").flops == 6 * one
    with pytest.raises(KeyError, match="outer/products: outer has the scopes product"):
        cost["outer/products"]


def abstract_step(model, sections, optimization=None):
    steps = TrainStep(model, *sections, optimization or model_fixtures.optimization())
    training = sections[1]
    batch = {name: i32(training.batch, training.sequence) for name in ("tokens", "targets", "segments", "positions")}
    return steps, jax.eval_shape(steps.init), batch


def every_node(cost):
    yield cost
    for child in cost.children.values():
        yield from every_node(child)


def test_the_tree_of_a_model_adds_up():
    steps, state, batch = abstract_step(model_fixtures.model(), model_fixtures.sections(remat="full", microbatches=2))
    cost = count(steps.train, state, batch)
    for node in every_node(cost):
        for figure in ("flops", "matmul_flops", "elementwise_flops", "reduction_flops", "bytes_in", "bytes_out"):
            parts = [node.of(scope=()), *node.children.values()]
            assert getattr(node, figure) == sum(getattr(part, figure) for part in parts)
            phases = node.forward, node.backward, node.rematerialised
            assert getattr(node, figure) == sum(getattr(phase, figure) for phase in phases)
    assert not cost.assumed
    assert "attention" in str(cost)

    # Every matrix has its scope, and does 2 FLOPs per number and token forward, twice that backward.
    tokens, (_, abstract) = 8 * model_fixtures.CONTEXT, tree.abstract(model_fixtures.model())
    for path, parameter in tree.paths(tree.dimensions(abstract)).items():
        if parameter.inputs and path != "embedding":
            each = 2 * math.prod(parameter.shape) * tokens
            assert cost[path].forward.matmul_flops == each, path
            assert cost[path].backward.matmul_flops == 2 * each, path
    assert cost["layers/feed_forward/down"].rematerialised.flops == 0
    assert cost["layers/feed_forward/up"].rematerialised.flops == cost["layers/feed_forward/up"].forward.flops


COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")


INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = \w+\[([\d,]*)\]")


def executed_products(text):
    """FLOPs of the products in an optimised program, times the trips of the loops around them, in the branches that
    have most."""
    lines, name, entry = {}, "", ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[1]
            entry = name if line.startswith("ENTRY") else entry
        lines.setdefault(name, []).append(line)

    def numbers(text):
        return [int(n) for n in text.split(",") if n]

    def flops(name):
        total, shapes = 0, {}
        for line in lines[name]:
            if match := INSTRUCTION.match(line):
                shapes[match[1]] = numbers(match[2])
            assert "convolution(" not in line and not re.search(r"custom-call\(.*dot_general", line), line
            if match := re.search(r" dot\((?:\w+\[[\d,]*\]\S* )?%([\w.-]+),", line):
                contracted = numbers(re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)[1])
                result = numbers(INSTRUCTION.match(line)[2])
                total += 2 * math.prod(result) * math.prod(shapes[match[1]][i] for i in contracted)
            trips = 1
            if " while(" in line:
                trips = int(re.search(r'known_trip_count"?:\{"n":"(\d+)"', line)[1])
            for callee in re.findall(r"(?:calls|body|to_apply)=%?([\w.-]+)", line):
                total += trips * flops(callee)
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            branches = re.findall(r"%([\w.-]+)", branches[1] if branches else "") or re.findall(
                r"(?:true|false)_computation=%?([\w.-]+)", line
            )
            total += max(map(flops, branches), default=0)
        return total

    return flops(entry)


SETTINGS = [
    pytest.param("llama", {}, {}, id="llama"),
    pytest.param("llama", {"remat": "full", "microbatches": 2}, {}, id="llama, microbatches"),
    pytest.param("llama", {"remat": "full", "scan_layers": False}, {}, id="llama, unrolled"),
    pytest.param("gpt2", {"remat": ("query", "key", "value", "up")}, {}, id="gpt2"),
    pytest.param("qwen3", {"remat": ("attention",), "dropout": 0.1, "z_loss": 1e-4}, {}, id="qwen3, dropout"),
    pytest.param("llama3.1", {"scan_layers": False}, {"kind": "muon"}, id="llama3.1, muon"),
    pytest.param("latent", {"remat": ("latent", "attention")}, {"kind": "muon"}, id="latent, muon"),
]


@pytest.mark.parametrize(
    "family, training, optimization",
    sampled(SETTINGS, ["llama3.1, muon", "latent, muon"]),
)
def test_products_of_the_training_step_are_those_that_run(family, training, optimization):
    mesh = meshes.make()
    steps, state, batch = abstract_step(
        model_fixtures.model(model_fixtures.FAMILIES[family]),
        model_fixtures.sections(**training),
        model_fixtures.optimization(**optimization),
    )
    with jax.set_mesh(mesh):
        text = steps.jitted(mesh).train.lower(state, batch).compile().as_text()
    cost = count(steps.train, state, batch)
    assert cost.matmul_flops == executed_products(text)
    assert not cost.assumed


@pytest.mark.parametrize(
    "shape, microbatches", [((2, 2, 2), 1), pytest.param((4, 1, 2), 2, marks=pytest.mark.exhaustive)], ids=str
)
def test_the_products_of_all_devices_are_those_of_one(shape, microbatches):
    mesh = meshes.make(*shape)
    sections = model_fixtures.sections(remat="full", microbatches=microbatches, batch=16)
    steps, state, batch = abstract_step(model_fixtures.model(), sections)

    def lying(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    rows = named_sharding(("batch", "sequence"), batch["tokens"].shape, mesh)
    with jax.set_mesh(mesh):
        cost = count(steps.train, state, batch)
        arguments = jax.tree.map(lying, state, steps.shardings(mesh)), jax.tree.map(lambda x: lying(x, rows), batch)
        text = steps.jitted(mesh).train.lower(*arguments).compile().as_text()
    assert cost.matmul_flops == mesh.size * executed_products(text)
    # Float32 gradients and the loss cross the data axis once, placed by the program itself or by XLA's partitioner.
    sent = shape[0] * 4 * (tree.parameter_count(model_fixtures.model()) + 1)
    written = [(each.kind, each.axes, each.bytes) for each in cost.collectives]
    assert written == ([] if microbatches == 1 else [("all-reduce", ("data",), sent)])


@pytest.mark.parametrize("family", sampled(["llama", "mistral", "gpt2", "latent"], ["mistral", "latent"]))
def test_loops_over_data_run_as_often_as_their_arguments_say(family):
    """The bound of the loop over pages follows from the positions of an engine's rows."""
    model = model_fixtures.model(model_fixtures.FAMILIES[family], context_length=128)
    programs = EnginePrograms.of(model, meshes.make(), jnp.dtype("float32"), EngineSettings(slots=4, page=32))
    shape, cache = StepShape(4, 0, TILE), CacheSize(128, tuple(17 for _ in programs.layout.groups))
    step = programs.step(shape, cache)
    batch = programs.empty_batch(shape, cache)
    batch.position_R[:] = 5, 40, 90, -1
    loops = {loop_name(1, None): 3, loop_name(1, 5): 1}
    program = hlo.parse(step.compile().as_text(), loops)
    jaxpr, (parameters, pages, _, _, valid) = step.trace().jaxpr.jaxpr, step.operands
    given = jax.tree.leaves((parameters, pages, NextTokens.empty(5), batch, valid))
    assert count_jaxpr(jaxpr, arguments=given).matmul_flops == program_flops(program)


def test_loops_in_a_scan_run_as_often_as_each_row_of_arguments_says():
    """A step reads the tiles of prompts in blocks of four, sorted by their pages: two blocks of 3 and of no trips."""
    programs = EnginePrograms.of(
        model_fixtures.model(context_length=128), meshes.make(), jnp.dtype("float32"), EngineSettings(slots=2, page=32)
    )
    shape, cache = StepShape(2, 6, TILE), CacheSize(128, (9,))
    step, batch = programs.step(shape, cache), programs.empty_batch(shape, cache)
    batch.position_R[2 : 2 + TILE] = np.arange(TILE)
    batch.position_R[2 + 3 * TILE : 2 + 4 * TILE] = np.arange(64, 64 + TILE)
    loops = {loop_name(1, None): 0, loop_name(TILE, None): Fraction(block_trips([1, 3], 6, TILE), 2)}
    assert loops[loop_name(TILE, None)] == Fraction(3, 2)
    compiled = program_flops(hlo.parse(step.compile().as_text(), loops))
    jaxpr, (parameters, pages, _, _, valid) = step.trace().jaxpr.jaxpr, step.operands
    given = jax.tree.leaves((parameters, pages, NextTokens.empty(3), batch, valid))
    assert count_jaxpr(jaxpr, arguments=given).matmul_flops == count_jaxpr(jaxpr, loops).matmul_flops == compiled


def test_a_loop_whose_scan_hands_its_bound_on_is_not_known():
    """Each row says how far the loop in its run counts; a number that one run hands to the next says nothing."""
    x, ends = jax.ShapeDtypeStruct((8, 8), jnp.float32), np.array([2, 0, 3], np.int32)

    def in_rows(x, ends):
        return jax.lax.map(lambda end: jax.lax.fori_loop(0, end, lambda _, y: y @ y, x), jnp.sort(ends))

    def handed_on(x, end):
        def run(end, _):
            return end + 1, jax.lax.fori_loop(0, end, lambda _, y: y @ y, x)

        return jax.lax.scan(run, end, length=3)

    assert count(in_rows, x, ends).matmul_flops == 5 * 2 * 8**3
    with pytest.raises(ValueError, match="does not say how often"):
        count(handed_on, x, ends[0])
    for trips in (Fraction(9, 3), {"": 3, "another": 5}):
        assert count(handed_on, x, ends[0], trips=trips).matmul_flops == 9 * 2 * 8**3


def test_a_branch_that_the_arguments_choose_is_counted():
    """A condition of numbers, also of rows that an index takes from floating point numbers; not of unknown ones."""

    def chosen(which, scale, x):
        x = jax.lax.cond(jnp.any(scale[which] > 1.0), lambda: x @ x @ x, lambda: x @ x)
        return jax.lax.switch(which[0], [lambda: x, lambda: x @ x, lambda: x + 1.0])

    x, product = jax.ShapeDtypeStruct((8, 8), jnp.float32), 2 * 8**3
    scale = np.array([0.5, 2.0, 0.25], np.float32)

    def products(which, scale=scale):
        return count(chosen, which, scale, x).matmul_flops / product

    assert [products(np.array([i, 2])) for i in range(3)] == [1, 3, 1]
    assert products(np.array([0, 2]), jax.ShapeDtypeStruct((3,), jnp.float32)) == 2  # dearer
    assert products(jax.ShapeDtypeStruct((2,), jnp.int32)) == 3
    assert products(np.array([9, 0])) == 2  # an index beyond the rows: the condition is not known, the last branch is


def test_numbers_of_arguments_are_as_jax_has_them():
    """They have 32 bits. A float that XLA would saturate as an integer is not known; `reduce_or` is of all bits."""
    x, product = jax.ShapeDtypeStruct((8, 8), jnp.float32), 2 * 8**3

    def chosen(condition, *numbers):
        def branch(*numbers):
            return jax.lax.cond(condition(*numbers), lambda: x_ @ x_, lambda: x_ @ x_ @ x_)

        x_ = jnp.ones((8, 8))
        return count(branch, *numbers).matmul_flops / product

    assert chosen(lambda w: jnp.any(w > np.float32(0.1)), np.array([0.1 + 2e-9])) == 2
    assert chosen(lambda w: w[0] + 1 > 0, np.array([2**31 - 1])) == 2
    beyond = [np.array(each, np.float32) for each in (np.inf, np.nan, 3e9)]
    assert [chosen(lambda w: w.astype(jnp.int32) == 5, each) for each in beyond] == [2, 2, 2]
    assert chosen(lambda w: w.astype(jnp.int32) == 5, np.array(5.5, np.float32)) == 1

    def loop(bits, x):
        return jax.lax.fori_loop(0, jax.lax.reduce_or(bits, (0,)), lambda _, y: y @ x, x)

    assert count(loop, np.array([4, 2], np.int32), x).matmul_flops == 6 * product


def test_the_branch_of_a_platform_is_counted():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def both(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x @ x, tpu=lambda x: x @ x @ x, default=lambda x: x)

    flops = [count(both, x, platform=platform).matmul_flops for platform in ("cpu", "tpu", "gpu", None)]
    assert flops == [2 * 8**3, 4 * 8**3, 0, 4 * 8**3]

    def without_default(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x @ x, cuda=lambda x: x @ x @ x)

    assert count(without_default, x, platform="gpu").matmul_flops == 4 * 8**3
    with pytest.raises(ValueError, match="no branch for the platform tpu"):
        count(without_default, x, platform="tpu")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("how", [Sampling(), GREEDY, Sampling(top_p=0.9), Sampling(logprobs=5)], ids=str)
def test_a_draw_is_counted_as_the_engine_s_program(how, platform):
    """To the last FLOP and byte, for any number of rows; nothing is counted that no row asks for."""
    model = model_fixtures.model(vocab_size=300)
    programs = EnginePrograms.of(model, meshes.make(), jnp.dtype("float32"), EngineSettings(slots=7, page=32))
    state = programs.empty_state()._replace(how=row_sampling([how] * 8, 0))
    _, logits, _, valid = programs.draw(7).operands
    ids = np.arange(7, dtype=np.int32)
    jaxpr = programs.draw(7).trace().jaxpr.jaxpr
    given = jax.tree.leaves((state, logits, DrawRows(ids, 0 * ids, 0 * ids, ids), valid))
    cost = count_jaxpr(jaxpr, arguments=given, platform=platform)
    assert draw_work(7, 300, how, platform) == (cost.flops, cost.bytes_in + cost.bytes_out)
    assert (cost.flops == 0) == (how == GREEDY)
    logs = "log" in {row.primitive for row in cost.rows}
    assert cost.matmul_flops == 0 and not cost.assumed and logs == (how.logprobs is not None)


def published(name):
    return ModelConfig(**tomllib.loads((MODELS / f"{name}.toml").read_text())["model"])


def test_the_largest_model_counts_in_seconds():
    model = published("llama3.1-405b")
    sections = model_fixtures.sections(
        batch=512, sequence=model.context_length, dtype="bfloat16", remat="full", microbatches=4
    )
    begin = time.perf_counter()
    cost = count(*(lambda steps, *state: (steps.train, *state))(*abstract_step(model, sections)))
    assert time.perf_counter() - begin < 20  # some two seconds on two quiet cores
    tokens = 512 * model.context_length
    assert cost["layers/attention/query"].forward.flops == 2 * 126 * 16384 * 16384 * tokens
    assert cost["unembedding"].matmul_flops == 6 * 16384 * 128256 * tokens
    assert not cost.assumed


def test_no_backend_is_asked():
    code = """
import jax
from model_fixtures import model, optimization, sections
import meshes
from jaxlm.costs.counted.drawing import draw_work
from jaxlm.costs.jaxpr.count import count, count_jaxpr
from jaxlm.training.step import TrainStep
steps = TrainStep(model(), *sections(microbatches=2, batch=4096), optimization())
batch = {k: jax.ShapeDtypeStruct((4096, 32), "int32") for k in ("tokens", "targets", "segments", "positions")}
state = jax.eval_shape(steps.init)
alone = count(steps.train, state, batch)
with jax.sharding.use_abstract_mesh(meshes.abstract(1024, 2, 4)):
    spread = count(steps.train, state, batch)
assert alone.matmul_flops == spread.matmul_flops
assert [(sent.kind, sent.axes) for sent in spread.collectives] == [("all-reduce", ("data",))]
print(jax._src.xla_bridge.backends_are_initialized())
"""
    here = Path(__file__).parents[2]
    path = {"PYTHONPATH": f"{here}:{here.parent}", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path, check=False)
    assert ran.stdout.strip() == "False", ran.stderr


def test_figures_are_whole_numbers():
    cost = count(lambda x: jnp.sum(jnp.sin(x @ x)), f32(np.int64(8), np.int64(8)))
    assert all(type(n) is int for row in cost.rows for n in row[6:])
    assert cost.intensity == cost.flops / (cost.bytes_in + cost.bytes_out)
