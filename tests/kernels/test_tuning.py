"""Sizes of blocks come from the table of the chip; the tuner finds the fastest of a made-up clock."""

import functools
import json
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import gated_activation, rms_norm, softmax, tune, tuning
from kernels_pallas.registry import OPERATIONS
from kernels_pallas.rows import mosaic_tpu


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
    kernel = tuning.Kernel("norm", "triton", (256,), "bfloat16")
    tuning.record("NVIDIA H200", {kernel: Sizes(rows=2)}, table)
    assert ask() == Sizes()
    tuning.record("cpu", {kernel: Sizes(rows=4)}, table)
    assert ask() == Sizes(rows=4)
    assert json.loads(table.read_text())["NVIDIA H200"] == {"norm triton 256 bfloat16": {"rows": 2, "columns": 256}}


def test_what_is_tried_is_what_runs(table):
    with tuning.trying({}) as asked:
        wanted = rms_norm(jnp.ones((64, 100)), implementation="triton", _interpret=True)
    ((kernel, (blocks, free)),) = asked.items()
    assert kernel == ("rms_norm", "triton", (128,), "float32")
    assert free == ("rows", "warps")  # a row is held whole
    with tuning.trying({kernel: blocks._replace(rows=4)}) as asked:
        assert jnp.array_equal(rms_norm(jnp.ones((64, 100)), implementation="triton", _interpret=True), wanted)
    assert asked[kernel].blocks.rows == 4


def test_what_is_0_stays_0(table):
    """In the table and in a trial: the kernel does not ask for it."""
    ask = functools.partial(tuning.blocks, "norm", "triton", (256,), "bfloat16", Sizes(columns=0))
    kernel = tuning.Kernel("norm", "triton", (256,), "bfloat16")
    tuning.record("cpu", {kernel: Sizes(4, 128, 16)}, table)
    assert ask() == Sizes(4, 0, 0)
    with tuning.trying({kernel: Sizes(2, 128, 16)}) as asked:
        assert ask() == Sizes(2, 0, 0)
    assert asked == {kernel: (Sizes(2, 0, 0), ("rows",))}


@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu"])
@pytest.mark.parametrize("function, operands", [(softmax, 1), (gated_activation, 2)])
def test_what_one_width_was_tuned_with_serves_others(table, implementation, function, operands):
    """1,600 and 2,000 columns share an entry: rows are whole at both, and no block ends within the array."""
    run = functools.partial(function, implementation=implementation, _interpret=True)

    def drawn(width):
        return jax.random.normal(jax.random.key(0), (operands, 64, width))

    with tuning.trying({}) as asked:
        run(*drawn(1600))
    tuning.record("cpu", {kernel: got.blocks for kernel, got in asked.items()}, table)
    wanted = function(*drawn(2000), implementation="reference")
    chex.assert_trees_all_close(run(*drawn(2000)), wanted, rtol=1e-5, atol=1e-6)
    for sizes in json.loads(table.read_text())["cpu"].values():
        assert "columns" not in sizes or sizes["columns"] % 128 == 0


def test_tuned_rows_are_no_more_than_vmem_holds(table, monkeypatch):
    """Tuned on plain rows of 1,025 numbers, run on masked ones of 2,048."""
    kernel = tuning.Kernel("softmax", "mosaic_tpu", (2048,), "float32")
    tuning.record("cpu", {kernel: mosaic_tpu.Blocks(rows=1024, columns=0)}, table)
    blocks = []

    def call(*arguments, in_specs, **more):
        blocks.extend(spec.block_shape for spec in in_specs)
        return real(*arguments, in_specs=in_specs, **more)

    real = mosaic_tpu.launch.call
    monkeypatch.setattr(mosaic_tpu.launch, "call", call)
    x = jnp.ones((1024, 2048))
    softmax(x, x > 0, implementation="mosaic_tpu", _interpret=True)
    most = mosaic_tpu.rows_that_fit(1024, 2048, [jnp.dtype(d) for d in ("float32", "int8", "float32")])
    assert blocks == [(most, 2048)] * 2 and most < 1024


def test_the_tuner_climbs_to_the_fastest(monkeypatch):
    """One number at a time, past what does not compile, and never a number that must stay."""
    kernel = tuning.Kernel("norm", "triton", (256,), "bfloat16")

    def program(*arguments, **more):
        tuning.blocks("norm", "triton", (256,), "bfloat16", Sizes(columns=0))

    def seconds(operation, case, implementation, blocks):
        rows = blocks[kernel].rows
        return None if rows > 64 else 1.0 + abs(rows - 64)

    monkeypatch.setattr(tune, "program", program)
    monkeypatch.setattr(tune, "_seconds", seconds)
    operation = OPERATIONS["rms_norm"]
    assert tune.tune(operation, operation.used_in("bench")[0], "triton") == {kernel: Sizes(rows=64, columns=0)}


def test_nothing_to_tune_on_a_cpu(table, capsys):
    tune.main(["rms_norm"])
    assert capsys.readouterr().out == "no kernel runs on cpu: there is nothing to tune\n"
    assert table.read_text() == "{}"


def test_the_table_names_sizes_that_kernels_have():
    """A renamed field would be an error on that chip alone."""
    for chip, rows in json.loads(tuning.TABLE.read_text()).items():
        for kernel, sizes in rows.items():
            assert all(isinstance(n, int) and n >= 0 for n in sizes.values()), f"{chip}: {kernel}"
