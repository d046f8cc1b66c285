"""Every kernel compiles for every chip that it is lowered for, forward and backward, without the chip."""

from pathlib import Path

import pytest
from elsewhere import ELSEWHERE

from jaxlm.lowering import kernel_matrix
from kernels_pallas.matmul import triton

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"


@ELSEWHERE
@pytest.mark.slow
@pytest.mark.parametrize("chip", kernel_matrix.CHIPS)
def test_all_kernels_compile(chip):
    problems = {str(row): problem for row, problem in kernel_matrix.compile_rows(chip).items() if problem}
    assert not problems


@ELSEWHERE
def test_a_kernel_that_does_not_fit_fails(monkeypatch):
    """Sixteen stages of a product's tiles are more than the shared memory of an A100."""
    (row,) = (r for r in kernel_matrix.rows() if r.implementation == "triton" and r.case.name == "4096³, GELU")
    too_deep = triton.Blocks(128, 256, 64, warps=8, stages=16)
    monkeypatch.setattr(triton, "default_blocks", lambda *arguments: too_deep)
    monkeypatch.setattr(kernel_matrix, "rows", lambda: [row])
    assert "hared memory" in kernel_matrix.compile_rows("A100")[row]


def test_the_document_has_the_whole_table():
    """Any change of operations, cases or chips is in docs/kernels.md: python benchmarks/compile_matrix.py --write"""
    everywhere = {
        chip: {row: "" for row in kernel_matrix.rows() if chip in kernel_matrix.LOWERED_FOR[row.implementation]}
        for chip in kernel_matrix.CHIPS
    }
    assert kernel_matrix.table(everywhere) in DOCUMENT.read_text()
