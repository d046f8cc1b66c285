"""Every kernel compiles for every chip that it is lowered for, forward and backward, without the chip."""

import json
from pathlib import Path

import pytest
from elsewhere import ELSEWHERE

from jaxlm.lowering import kernel_matrix
from kernels_pallas.matmul import triton

PROJECT = Path(__file__).parents[2]
DOCUMENT, RESULTS = PROJECT / "docs" / "kernels.md", PROJECT / "benchmarks" / "results" / "compiled"

# Bytes per thread: a quarter of its registers, which the first-level cache holds for all threads.
SPILLED = 256
# Of what the matrix units could do: with libtpu 0.0.42 no kernel of attention is below 0.31, with 0.0.50 on v6e 0.24.
LEAST_PRODUCTS = 0.2
SCHEDULED = "v6e"  # where libtpu leaves them most idle; schedules.json has those of all
PRODUCTS = {"A100": "mma.sync", "H100": "wgmma", "B200": "tcgen05.mma"}


@ELSEWHERE
@pytest.mark.slow
@pytest.mark.parametrize("chip", kernel_matrix.CHIPS)
def test_all_kernels_compile(chip):
    outcomes = kernel_matrix.compile_rows(chip, schedules=chip == SCHEDULED)
    assert not {str(row): outcome.problem for row, outcome in outcomes.items() if outcome.problem}
    if chip in kernel_matrix.ASSEMBLED:
        assert not list(_slow(chip, outcomes))
    if chip == SCHEDULED:
        assert not list(_idle(outcomes))


def _slow(chip, outcomes):
    """Kernels that would wait for memory without need. In float32 attention and products are for checking, and a row of
    32768 with its gradient is as large as all registers together."""
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
    too_deep = triton.Blocks(128, 256, 64, warps=8, stages=16)
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
    assert kernel_matrix.table(everywhere) in DOCUMENT.read_text()


@pytest.mark.parametrize("name", ["assembly", "schedules"])
def test_the_document_has_what_the_results_files_have(name):
    """The registers of machine code, the bundles of schedules: python benchmarks/compile_matrix.py --write"""
    records = json.loads((RESULTS / f"{name}.json").read_text())["kernels"]
    table = {"assembly": kernel_matrix.registers_table, "schedules": kernel_matrix.schedules_table}[name]
    assert table(records) in DOCUMENT.read_text()
    if name == "schedules":
        products = {str(r): r["busy"]["MXU"] for r in records if r["row"].startswith("flash_attention")}
        assert products and not {row: busy for row, busy in products.items() if busy < LEAST_PRODUCTS}
    rows = {str(row) for row in kernel_matrix.rows() if (row.implementation == "mosaic_tpu") == (name == "schedules")}
    assert {record["row"] for record in records} == rows
