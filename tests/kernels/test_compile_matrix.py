"""Every kernel compiles for every chip that it is lowered for, forward and backward, without the chip."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from markers import ELSEWHERE

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import kernel_matrix, kernel_tables, sass
from kernels_pallas.matmul import triton

PROJECT = Path(__file__).parents[2]
DOCUMENT, RESULTS = PROJECT / "docs" / "kernels.md", PROJECT / "benchmarks" / "results" / "compiled"
COMPILERS = ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "nvidia-cuda-nvcc")

# Bytes per thread: a quarter of its registers, which the first-level cache holds for all threads.
SPILLED = 256
# Of what the matrix units could do: with libtpu 0.0.42 no kernel of attention is below 0.31, with 0.0.50 on v6e 0.24.
LEAST_PRODUCTS = 0.2
SCHEDULED = "v6e"  # where libtpu leaves them most idle
# What its instructions ask of an SM to that of its memory, tensor cores or exponentials, which no other code saves.
MOST_ASKED = 1.2
PRODUCTS = {"A100": "mma.sync", "H100": "wgmma", "B200": "tcgen05.mma"}


def _of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def _recorded():
    """Outcomes by chip and row, as the results files have them."""
    return kernel_matrix.recorded(
        _of("compile_matrix")["programs"], _of("assembly")["kernels"], _of("schedules")["kernels"]
    )


def _by_these_compilers():
    wrote = _of("compile_matrix")["versions"]
    return all(metadata.version(name) == wrote[name] for name in COMPILERS)


@ELSEWHERE
@pytest.mark.slow
@pytest.mark.parametrize("chip", kernel_matrix.CHIPS)
def test_all_kernels_compile(chip):
    """All are lowered, and compiled what these compilers have not compiled before: to the bit the same programs are in
    the results files with what came of them, which the next test reads."""
    known = {outcome.program for (on, _), outcome in _recorded().items() if on == chip and _by_these_compilers()}
    outcomes = kernel_matrix.compile_rows(chip, known, schedules=chip == SCHEDULED)
    assert not {str(row): outcome.problem for row, outcome in outcomes.items() if outcome.problem}
    new = {row: outcome for row, outcome in outcomes.items() if outcome.program not in known}
    if chip in kernel_matrix.ASSEMBLED or chip == SCHEDULED:
        assert not list(_wanting(chip, new))
    assert not (known and new), "other programs than in the results files: python benchmarks/compile_matrix.py --write"


@pytest.mark.parametrize("chip", [*kernel_matrix.ASSEMBLED, *kernel_matrix.TPUS])
def test_what_is_recorded_of_kernels_wants_nothing(chip):
    recorded = {at[1]: outcome for at, outcome in _recorded().items() if at[0] == chip}
    rows = {row: recorded.pop(str(row)) for row in kernel_matrix.rows() if str(row) in recorded}
    assert rows and not recorded
    assert not list(_wanting(chip, rows))


def _wanting(chip, outcomes):
    return _idle(outcomes) if chip in kernel_matrix.TPUS else _slow(chip, outcomes)


def _slow(chip, outcomes):
    """Kernels that would wait without need for memory or for their own instructions. In float32 attention and products
    are for checking, and a row of 32768 with its gradient is as large as all registers together."""
    for row, outcome in outcomes.items():
        # Mosaic GPU says nothing of what an earlier test had compiled.
        assert len(outcome.kernels) > 1 or row.implementation == "mosaic_gpu", row
        if row.case.dtypes[0] == "float32":
            continue
        multiplies = row.operation.name in ("matmul", "flash_attention")
        for kernel in outcome.kernels:
            where = f"{row}: {kernel}"
            if kernel.spilled > SPILLED:
                yield f"{where}: spills"
            if kernel.products != (PRODUCTS[chip] if multiplies else ""):
                yield f"{where}: multiplies by {kernel.products or 'nothing'}"
            known = Target.parse(kernel_matrix.CHIPS[chip]).chip
            if sass.knows(known):
                asked = sass.cycles(known, kernel.hot, cached=multiplies)
                least = max(asked.get(unit, 0) for unit in ("MEMORY", "TENSOR", "SPECIAL"))
                if max(asked.values()) > MOST_ASKED * least:
                    yield f"{where}: too many instructions"
            if kernel.reads < 16 or kernel.writes < 16 and not kernel.name.endswith("statistics"):
                yield f"{where}: narrow"


def _idle(outcomes):
    """Kernels of attention that leave the matrix units idle. Those of v6e and later are so fast that what is done
    between products decides; where head widths fill less than half of them, more so."""
    for row, outcome in outcomes.items():
        assert len(outcome.kernels) > 1, row
        if row.operation.name == "flash_attention":
            yield from (f"{row}: {kernel}" for kernel in outcome.kernels if kernel.busy["MXU"] < LEAST_PRODUCTS)


@ELSEWHERE
def test_a_kernel_that_does_not_fit_fails(constant, monkeypatch):
    """Sixteen stages of a product's tiles are more than the shared memory of an A100."""
    (row,) = (r for r in kernel_matrix.rows() if r.implementation == "triton" and r.case.name == "4096³, GELU")
    too_deep = triton.MatmulTritonBlocks(128, 256, 64, warps=8, stages=16)
    constant(triton, "default_blocks", lambda *arguments: too_deep)
    monkeypatch.setattr(kernel_matrix, "rows", lambda: [row])
    assert "hared memory" in kernel_matrix.compile_rows("A100")[row].problem


def test_the_document_has_the_whole_table():
    """Any change of operations, cases or chips is in docs/kernels.md: python benchmarks/compile_matrix.py --write"""
    everywhere = {
        chip: {
            row: kernel_matrix.Outcome("")
            for row in kernel_matrix.rows()
            if chip in kernel_matrix.LOWERED_FOR[row.implementation]
        }
        for chip in kernel_matrix.CHIPS
    }
    assert kernel_tables.compiled(everywhere) in DOCUMENT.read_text()
    assert _recorded().keys() == {(chip, str(row)) for chip, by in everywhere.items() for row in by}


@pytest.mark.parametrize("name, tables", [("assembly", ("registers", "loops")), ("schedules", ("schedules",))])
def test_the_document_has_what_the_results_files_have(name, tables):
    """The registers and loops of machine code, the bundles of schedules: python benchmarks/compile_matrix.py --write"""
    records = _of(name)["kernels"]
    assert all(getattr(kernel_tables, table)(records) in DOCUMENT.read_text() for table in tables)
    rows = {str(row) for row in kernel_matrix.rows() if (row.implementation == "mosaic_tpu") == (name == "schedules")}
    assert {record["row"] for record in records} == rows
