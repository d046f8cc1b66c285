"""Sizes of blocks come from the table of the chip; the tuner finds the fastest of a made-up clock."""

import functools
import json
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from kernels_pallas import rms_norm, tune, tuning
from kernels_pallas.registry import OPERATIONS


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
    assert json.loads(table.read_text())["NVIDIA H200"] == {"norm triton 256 bfloat16": Sizes(rows=2)._asdict()}


def test_what_is_tried_is_what_runs(table):
    with tuning.trying({}) as asked:
        wanted = rms_norm(jnp.ones((64, 100)), implementation="triton", _interpret=True)
    ((kernel, (blocks, free)),) = asked.items()
    assert kernel == ("rms_norm", "triton", (128,), "float32")
    assert free == ("rows", "warps")  # a row is held whole
    with tuning.trying({kernel: blocks._replace(rows=4)}) as asked:
        assert jnp.array_equal(rms_norm(jnp.ones((64, 100)), implementation="triton", _interpret=True), wanted)
    assert asked[kernel].blocks.rows == 4


def test_the_tuner_climbs_to_the_fastest(monkeypatch):
    """One number at a time, past what does not compile, and never a number that must stay."""
    kernel = tuning.Kernel("norm", "triton", (256,), "bfloat16")

    def program(*arguments, **more):
        tuning.blocks("norm", "triton", (256,), "bfloat16", Sizes(), fixed=("columns",))

    def seconds(operation, case, implementation, blocks):
        rows = blocks[kernel].rows
        return None if rows > 64 else 1.0 + abs(rows - 64)

    monkeypatch.setattr(tune, "program", program)
    monkeypatch.setattr(tune, "_seconds", seconds)
    operation = OPERATIONS["rms_norm"]
    assert tune.tune(operation, operation.used_in("bench")[0], "triton") == {kernel: Sizes(rows=64)}


def test_nothing_to_tune_on_a_cpu(table, capsys):
    tune.main(["rms_norm"])
    assert capsys.readouterr().out == "no kernel runs on cpu: there is nothing to tune\n"
    assert table.read_text() == "{}"


def test_the_table_names_sizes_that_kernels_have():
    """A renamed field would be an error on that chip alone."""
    for chip, rows in json.loads(tuning.TABLE.read_text()).items():
        for kernel, sizes in rows.items():
            assert all(isinstance(n, int) and n >= 0 for n in sizes.values()), f"{chip}: {kernel}"
