"""Block sizes come from the chip's table; the tuner finds the fastest of a simulated clock."""

import functools
import json
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from launches import launches
from markers import ELSEWHERE
from matrices import sampled
from test_costs import both_ways

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from kernels_pallas import (
    flash_attention,
    gated_activation,
    linear_cross_entropy,
    matmul,
    rms_norm,
    rotary_embedding,
    softmax,
)
from kernels_pallas.bench import tune
from kernels_pallas.bench.timing import KernelTime
from kernels_pallas.core import interpreted, tuning
from kernels_pallas.core.registry import OPERATIONS
from kernels_pallas.core.rows import mosaic_tpu
from kernels_pallas.flash_attention import causal
from kernels_pallas.flash_attention import mosaic_tpu as attention
from kernels_pallas.matmul import mosaic_tpu as products


class Sizes(NamedTuple):
    rows: int = 8
    columns: int = 256
    programs: int = 0


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "blocks.json"
    path.write_text("{}")
    monkeypatch.setattr(tuning, "TABLE", path)
    tuning._table.cache_clear()
    yield path
    tuning._table.cache_clear()


def test_the_table_of_the_chip_and_of_no_other(table):
    ask = functools.partial(tuning.blocks, "norm", "triton", (200,), "bfloat16", Sizes())
    kernel = tuning.KernelKey("norm", "triton", (256,), "bfloat16")
    tuning.record("NVIDIA H200", {kernel: Sizes(rows=2)}, table)
    assert ask() == Sizes()
    tuning.record("cpu", {kernel: Sizes(rows=4)}, table)
    assert ask() == Sizes(rows=4)
    assert json.loads(table.read_text())["NVIDIA H200"] == {"norm triton 256 bfloat16": {"rows": 2, "columns": 256}}


@interpreted()
def test_what_is_tried_is_what_runs(table):
    with tuning.trying({}) as asked:
        wanted = rms_norm(jnp.ones((64, 100)), implementation="triton")
    ((kernel, (blocks, free)),) = asked.items()
    assert kernel == ("rms_norm", "triton", (128,), "float32")
    assert free == ("rows", "warps")  # a row is held whole
    with tuning.trying({kernel: blocks._replace(rows=4)}) as asked:
        assert jnp.array_equal(rms_norm(jnp.ones((64, 100)), implementation="triton"), wanted)
    assert asked[kernel].blocks.rows == 4


def test_what_is_0_stays_0(table):
    """In the table and in a trial, a kernel does not ask for a field that is 0."""
    ask = functools.partial(tuning.blocks, "norm", "triton", (256,), "bfloat16", Sizes(columns=0))
    kernel = tuning.KernelKey("norm", "triton", (256,), "bfloat16")
    tuning.record("cpu", {kernel: Sizes(4, 128, 16)}, table)
    assert ask() == Sizes(4, 0, 0)
    with tuning.trying({kernel: Sizes(2, 128, 16)}) as asked:
        assert ask() == Sizes(2, 0, 0)
    assert asked == {kernel: (Sizes(2, 0, 0), ("rows",))}


@pytest.mark.parametrize(
    "function, operands, implementation",
    sampled(
        [
            pytest.param(function, operands, name, id=f"{function.__name__}-{name}")
            for function, operands in ((softmax, 1), (gated_activation, 2))
            for name in ("triton", "mosaic_tpu")
        ],
        ["softmax-mosaic_tpu", "gated_activation-triton"],
    ),
)
@interpreted()
def test_what_one_width_was_tuned_with_serves_others(table, function, operands, implementation):
    """Widths 1,600 and 2,000 share an entry: blocks hold whole rows of both, and none ends within the array."""
    run = functools.partial(function, implementation=implementation)

    def drawn(width):
        return jnp.asarray(np.random.default_rng(0).standard_normal((operands, 64, width), np.float32))

    with tuning.trying({}) as asked:
        run(*drawn(1600))
    tuning.record("cpu", {kernel: got.blocks for kernel, got in asked.items()}, table)
    wanted = function(*drawn(2000), implementation="reference")
    chex.assert_trees_all_close(run(*drawn(2000)), wanted, rtol=1e-5, atol=1e-6)
    for sizes in json.loads(table.read_text())["cpu"].values():
        assert "columns" not in sizes or sizes["columns"] % 128 == 0


@interpreted()
def test_tuned_rows_are_no_more_than_vmem_holds(table, monkeypatch):
    """Tuned on plain rows of 1,025 numbers, run on masked ones of 2,048."""
    kernel = tuning.KernelKey("softmax", "mosaic_tpu", (2048,), "float32")
    tuning.record("cpu", {kernel: mosaic_tpu.RowsTpuBlocks(rows=1024, columns=0)}, table)
    blocks = []

    def call(*arguments, in_specs, **more):
        blocks.extend(spec.block_shape for spec in in_specs)
        return real(*arguments, in_specs=in_specs, **more)

    real = mosaic_tpu.launch.call
    monkeypatch.setattr(mosaic_tpu.launch, "call", call)
    x = jnp.ones((1024, 2048))
    softmax(x, x > 0, implementation="mosaic_tpu")
    most = mosaic_tpu.rows_that_fit(1024, 2048, [jnp.dtype(d) for d in ("float32", "int8", "float32")])
    assert blocks == [(most, 2048)] * 2 and most < 1024


@functools.cache
def _v5e():
    return Mesh(np.array(targets.devices(Target.parse("tpu-v5e:4"))[:1]), ("one",))


def _tiles(function, shapes, compiled=False):
    """Return the shapes of the first blocks of each kernel in a program for a TPU v5e and its derivative."""

    def both_ways(*arrays):
        results, pull_back = jax.vjp(function, *arrays)
        return results, pull_back(results)

    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with jax.set_mesh(_v5e()):
        traced = jax.jit(both_ways).trace(*structs)
        if compiled:
            traced.lower().compile()
    blocks = {kernel["name"]: kernel["grid_mapping"].block_mappings for kernel in launches(traced.jaxpr.jaxpr)}
    return {
        name: [[getattr(n, "block_size", 0) for n in one.block_shape][-2:] for one in of] for name, of in blocks.items()
    }


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
def test_tiles_of_scores_that_were_tuned_without_a_bias_are_not_taken_with_it():
    """Tiles that fit the 16 MiB of a v5e alone do not fit with a tile of a bias, nor with wider heads."""
    tuned = attention.FlashTpuBlocks(1024, 2048, 256)
    kernels = [f"flash_attention_{each}" for each in attention.FlashTpuTiling._fields]

    def attend(query, bias=None):
        return flash_attention(query, query, query, bias=bias, key_range=causal(2048), soft_cap=50.0)

    def tiles(width, bias=None):
        entry = {
            tuning.KernelKey(name, "mosaic_tpu", (2048, 2048, width, width), "bfloat16"): tuned for name in kernels
        }
        with tuning.trying(entry):
            found = _tiles(
                attend, [(1, 2048, 1, width)] + ([bias] if bias else []), compiled=bias == (1, 1, 2048, 2048)
            )
        return [tuple(found[name][i][0] for i in (0, 1)) for name in kernels]

    assert tiles(128) == tiles(128, (1, 1, 1, 2048)) == [(1024, 2048)] * 2
    assert tiles(128, (1, 1, 2048, 2048)) == [(512, 1024)] * 2
    assert tiles(256) == [(1024, 2048), (512, 1024)]


@ELSEWHERE
@pytest.mark.slow
@pytest.mark.parametrize("compiled", sampled([False, True], ["False"]))
def test_tiles_of_a_product_that_were_tuned_alone_are_not_taken_with_a_residual(compiled):
    tuned = products.MatmulTpuBlocks(1024, 1024, 512)
    entry = {tuning.KernelKey("matmul", "mosaic_tpu", (2048, 2048, 2048), "bfloat16"): tuned}
    square = 2048, 2048
    with tuning.trying(entry):
        alone = _tiles(matmul, [square, square])
        more = functools.partial(matmul, activation="gelu")
        added = _tiles(lambda a, b, c, d: more(a, b, c, d), [square, square, (2048,), square], compiled)
    assert alone["matmul"][0] == [1024, 512] and added["matmul"][0] == [512, 2048]


@pytest.mark.parametrize(
    "name, implementation",
    [
        (name, each)
        for name, of in OPERATIONS.items()
        for each in of.implementations
        # On TPUs linear attention has chunks in the place of blocks, which the caller names, and both passes share.
        if each != "mosaic_gpu" and not (each == "mosaic_tpu" and name in ("gated_delta_rule", "state_space"))
    ],
)
@interpreted()
def test_every_kernel_asks(name, implementation):
    """Every kernel that a row of the compile matrix launches, forward and backward, asks the table."""
    operation = OPERATIONS[name]
    case = operation.used_in("compile")[0]
    run, inputs, others = both_ways(operation, case, implementation=implementation)
    with tuning.trying({}) as asked:
        text = str(jax.make_jaxpr(run)(inputs, others))
    launched = set(re.findall(rf"name=({name}\w*)", text))
    least = 2 if inputs and not operation.gradients_by_xla else 1
    assert len(launched) >= least and {kernel.name for kernel in asked} == launched


@pytest.mark.parametrize("implementation", sampled(["triton", "mosaic_tpu"], ["mosaic_tpu"]))
@interpreted()
def test_the_loss_tuned_at_one_vocabulary_serves_others(table, implementation):
    """Vocabularies of 600 and 1,000 share an entry; with blocks of any size that fits the losses are the same."""

    def drawn(labels):
        random = np.random.default_rng(0)
        hidden, unembedding = (random.standard_normal(shape, np.float32) for shape in ((96, 32), (32, labels)))
        return hidden, unembedding, 6 * np.arange(96)

    @functools.partial(jax.jit, static_argnames="implementation")
    def losses_and_gradients(arrays, implementation):
        hidden, unembedding, targets = arrays
        run = functools.partial(linear_cross_entropy, implementation=implementation)
        losses, pull_back = jax.vjp(lambda *xs: run(*xs, targets), hidden, unembedding)
        return losses, *pull_back(jnp.ones_like(losses))

    sizes = {"columns": 128, "warps": 2, "stages": 1} if implementation == "triton" else {"rows": 16, "columns": 256}
    both = (f"linear_cross_entropy_{each} {implementation} 1024 float32" for each in ("statistics", "gradient"))
    table.write_text(json.dumps({"cpu": {kernel: sizes for kernel in both}}))
    for labels in (600, 1000):
        with tuning.trying({}) as asked:
            found = losses_and_gradients(drawn(labels), implementation=implementation)
        assert [got.blocks.columns for got in asked.values()] == [sizes["columns"]] * 2
        wanted = losses_and_gradients(drawn(labels), implementation="reference")
        chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", sampled(["triton", "mosaic_tpu"], ["triton"]))
@interpreted()
def test_rotary_tuned_with_few_heads_serves_more(table, implementation):
    """Five heads and eight share an entry; on TPUs no more rows than fit are taken, whatever the table says."""

    def drawn(heads):
        random = np.random.default_rng(0)
        x, angles = (random.standard_normal(shape, np.float32) for shape in ((2, 40, heads, 32), (2, 40, 16)))
        return tuple(map(jnp.asarray, (x, np.cos(angles), np.sin(angles))))

    run = functools.partial(rotary_embedding, implementation=implementation)
    for size in (1, 8, 2**20):
        sizes = {"numbers": max(size, 64), "warps": 2} if implementation == "triton" else {"rows": size}
        table.write_text(json.dumps({"cpu": {f"rotary_embedding {implementation} 8×32 float32": sizes}}))
        tuning._table.cache_clear()
        for heads in (5, 8):
            wanted = rotary_embedding(*drawn(heads), implementation="reference")
            chex.assert_trees_all_close(run(*drawn(heads)), wanted, rtol=1e-5, atol=1e-6)


NORM = tuning.KernelKey("norm", "triton", (256,), "bfloat16")


@pytest.fixture
def clock(monkeypatch):
    """Programs of one kernel with results by its number of rows; the nearer the rows are to 64, the faster."""

    def install(result=lambda rows: 1.0, left_out=lambda operation: None):
        def program(operation, case, implementation, **more):
            if implementation != "triton":
                raise NotImplementedError
            left_out(operation)
            rows = tuning.blocks("norm", "triton", (256,), "bfloat16", Sizes(columns=0)).rows

            def run():
                return [jnp.full(4, result(rows), jnp.bfloat16)]

            run.seconds = 1.0 + abs(rows - 64)
            return run

        monkeypatch.setattr(tune, "program", program)
        monkeypatch.setattr(
            tune, "measure", lambda run, rounds: KernelTime(run.seconds, run.seconds, run.seconds, "host")
        )

    return install


def tuned():
    operation = OPERATIONS["rms_norm"]
    return tune.tune(operation, operation.used_in("bench")[0], "triton")


def refuse(rows):
    raise jax.errors.JaxRuntimeError(f"INTERNAL: {rows} rows")


def test_the_tuner_climbs_to_the_fastest(clock):
    """The tuner changes one number at a time, skips sizes that do not run, and leaves fixed fields alone."""
    clock(lambda rows: 1.0 if rows <= 64 else refuse(rows))
    assert tuned() == {NORM: Sizes(rows=64, columns=0)}


def test_the_tuner_passes_over_other_results(clock, capsys):
    """One rounding is tolerated; a result that is not finite is not."""
    clock(lambda rows: {32: 1.03}.get(rows, 1.0 + rows / 8000))
    assert tuned() == {NORM: Sizes(rows=16, columns=0)}
    assert "other results with" in capsys.readouterr().out
    clock(lambda rows: jnp.nan if rows == 16 else 1.0)
    assert tuned() == {NORM: Sizes(rows=8, columns=0)}
    clock(lambda rows: jnp.inf)
    assert tuned() == {NORM: Sizes(rows=64, columns=0)}


def test_a_device_that_is_lost_ends_the_tuning(table, clock, monkeypatch):
    """No further case is tried, and earlier findings are recorded."""
    lost = []

    def result(rows):
        lost.extend([rows] if rows > 64 and left else [])
        return refuse(rows) if lost else 1.0

    left = []
    clock(result, lambda operation: left.append(operation) if operation.name == "softmax" else None)
    with pytest.raises(SystemExit, match="cpu was lost at softmax, small.*, triton: INTERNAL: 64 rows; what was found"):
        tune.main(["rms_norm", "softmax", "layer_norm"])
    assert json.loads(table.read_text()) == {"cpu": {str(NORM): {"rows": 64}}}


def test_what_does_not_fit_leaves_the_others_to_be_tuned(table, clock, capsys):
    """Nothing is recorded for that case, but earlier findings are."""

    def left_out(operation):
        if operation.name == "softmax":
            raise MemoryError("out of memory")

    clock(left_out=left_out)
    tune.main(["rms_norm", "softmax"])
    assert "left out: out of memory" in capsys.readouterr().out
    assert json.loads(table.read_text()) == {"cpu": {str(NORM): {"rows": 64}}}


def test_nothing_to_tune_on_a_cpu(table, capsys):
    tune.main(["rms_norm"])
    assert capsys.readouterr().out == "no kernel runs on cpu: there is nothing to tune\n"
    assert table.read_text() == "{}"


def test_the_table_names_sizes_that_kernels_have():
    """A renamed field would be an error on that chip only."""
    for chip, rows in json.loads(tuning.TABLE.read_text()).items():
        for kernel, sizes in rows.items():
            assert all(isinstance(n, int) and n >= 0 for n in sizes.values()), f"{chip}: {kernel}"
