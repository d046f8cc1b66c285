"""Every kernel compiles for every chip that it is lowered for, forward and backward, without the chip."""

import platform
import sys

import pytest

from benchmarks import compile_matrix

ELSEWHERE = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)


@ELSEWHERE
@pytest.mark.parametrize("chip", compile_matrix.CHIPS)
def test_all_kernels_compile(chip):
    problems = {str(row): problem for row, problem in compile_matrix.compile_rows(chip).items() if problem}
    assert not problems


def test_the_document_has_the_whole_table():
    """Any change of operations, cases or chips is in docs/kernels.md: python benchmarks/compile_matrix.py --write"""
    everywhere = {
        chip: {row: "" for row in compile_matrix.rows() if chip in compile_matrix.LOWERED_FOR[row.implementation]}
        for chip in compile_matrix.CHIPS
    }
    assert compile_matrix.written() == compile_matrix.table(everywhere)
