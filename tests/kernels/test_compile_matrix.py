"""Every kernel compiles for every chip that it is lowered for, forward and backward, without the chip."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from markers import ELSEWHERE
from matrices import sampled

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import kernel_matrix, kernel_tables, sass
from kernels_pallas.matmul import triton

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "compiled"
COMPILERS = ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "nvidia-cuda-nvcc", "nvidia-nvptxcompiler")

# Bytes that a thread of a 16-bit kernel may spill, by kernel, chip and release of the assembler, with the reason: as
# measured, rounded up to 16 registers, for releases of JAX differ by some. Other kernels may spill four registers.
_ROW = "a row of 32768 numbers and its gradient fill all registers"
_TILE = "a tile of the gradients fills all registers, and a smaller one multiplies less per byte that it loads"
_CHUNK = "gradients of two matrices of a chunk, a block of a state and that of its gradient fill all registers"
SPILLED = {
    ("softmax_backward", "A100"): ({"13.0": 128, "13.5": 128}, _ROW),
    ("softmax_backward", "H100"): ({"13.0": 128, "13.5": 128}, _ROW),
    ("softmax_backward", "B200"): ({"13.0": 128, "13.5": 128}, _ROW),
    ("flash_attention_query_gradient", "A100"): ({"13.0": 64, "13.5": 64}, _TILE),
    ("flash_attention_key_gradient", "A100"): ({"13.0": 128, "13.5": 128}, _TILE),
    ("flash_attention_key_gradient", "H100"): ({"13.0": 64, "13.5": 64}, _TILE),
    ("flash_attention_key_gradient", "B200"): ({"13.0": 64, "13.5": 64}, _TILE),
    ("paged_attention", "A100"): (
        {"13.0": 128, "13.5": 128},
        "32 queries of a sequence and their keys fill all registers",
    ),
    ("flash_attention_gradients_mosaic_gpu_kernel", "H100"): (
        {"13.0": 192, "13.5": 192},
        "two warpgroups hold gradients of 64 keys each, of 128 columns, and the tile of scores and of their gradients;"
        " of 256 columns each holds one gradient, and the tile of scores and its half of the query gradient",
    ),
}
SPILLED |= {
    ("gated_delta_rule_value_gradients", "A100"): ({"13.0": 192, "13.5": 192}, _CHUNK),
    ("gated_delta_rule_value_gradients", "H100"): ({"13.0": 64, "13.5": 128}, _CHUNK),
    ("gated_delta_rule_within_chunks", "A100"): (
        {"13.0": 256, "13.5": 256},
        "an exact product has both halves of two matrices of 64 × 64 float32 numbers in registers",
    ),
}
SPILLED_ELSEWHERE = 16
# Matrix products done in relation to those that the tiles need, by kernel and chip with the reason, and elsewhere.
REPEATED = {
    ("flash_attention_key_gradient", "H100"): (
        1.5,
        "gradients of 64 keys of width 256 need two warpgroups, and Triton has both compute the same scores;"
        " 32 keys, without that, are multiplied by mma.sync",
    ),
}
_LATENTS = (
    "16 keys of 576 channels are two tiles of scores for four warps, and two of these compute each; memory takes longer"
)
REPEATED |= {("paged_attention of latents", chip): (1.6, _LATENTS) for chip in ("A100", "H100", "B200")}
REPEATED_ELSEWHERE = 1.1
# Utilisation of the MXU: with libtpu 0.0.42 no attention kernel is below 0.31, with 0.0.50 on v6e none below 0.24.
LEAST_PRODUCTS = 0.2
SCHEDULED = "v6e"  # where libtpu leaves the MXU most idle
# Cycles of the busiest unit relative to those of memory, tensor cores or exponentials, which are unavoidable.
MOST_RELATIVE_CYCLES = 1.2
# Higher ones, by kernel and chip with the reason.
_ERF = (
    "the exact GELU evaluates an error function, a polynomial of many terms, and an A100 adds slowly beside its memory"
)
_SCALED = "numbers are scaled, written as bfloat16 and read again, and ptxas moves them and the sums between registers"
_CODES = "128 rows of a group are too few for the tensor cores to wait for what reads codes of MXFP4 and scales them"
_EDGES = "counted are instructions that put zeros into a group's first and last rows, and that other steps skip"
BUSIER = {
    ("bias_activation", "A100"): (1.4, _ERF),
    ("bias_activation_backward", "A100"): (1.21, _ERF),
    ("quantized_matmul", "A100"): (1.25, _SCALED),
    ("quantized_grouped_matmul", "A100"): (1.7, _CODES),
    ("quantized_grouped_matmul", "H100"): (1.55, _CODES),
    ("paged_attention of bytes", "A100"): (1.65, "an A100 converts FP8 by integer operations on each number"),
    ("grouped_matmul_backward_matrices_mosaic_gpu_kernel", "H100"): (1.4, _EDGES),
}
# Kernels whose innermost loop has neither memory, products nor exponentials: it eliminates rows of triangular blocks.
ELIMINATING = ("gated_delta_rule_within_chunks",)
_QUANTIZED = ("quantized_matmul", "quantized_grouped_matmul")
# Bytes that an instruction reads, where they are fewer than 16: Triton copies bytes for tensor cores eight at a time. A
# row of scales of MXFP4 are 64 bytes beside 16 rows of x, four for a thread.
READS = {"quantized_matmul": 8, "quantized_grouped_matmul": 4, "paged_attention of bytes": 8}
PRODUCTS = {"A100": "mma.sync", "H100": "wgmma", "B200": "tcgen05.mma"}


def _of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def _recorded():
    """Return the outcomes of the results files, by chip and row."""
    return kernel_matrix.recorded(
        _of("compile_matrix")["programs"], _of("assembly")["kernels"], _of("schedules")["kernels"]
    )


def _by_these_compilers():
    wrote = _of("compile_matrix")["versions"]
    return all(metadata.version(name) == wrote[name] for name in COMPILERS)


@ELSEWHERE
@pytest.mark.slow
@pytest.mark.parametrize("chip", sampled(kernel_matrix.CHIPS, ["B200", SCHEDULED]))
def test_all_kernels_compile(chip):
    """Lower all kernels, and compile those that these compilers have not compiled before.

    Bit-identical programs are in the results files with their outcomes, which the next test reads.
    """
    known = {outcome.program for (on, _), outcome in _recorded().items() if on == chip and _by_these_compilers()}
    outcomes = kernel_matrix.compile_rows(chip, known, schedules=chip == SCHEDULED)
    assert not {str(row): outcome.problem for row, outcome in outcomes.items() if outcome.problem}
    new = {row: outcome for row, outcome in outcomes.items() if outcome.program not in known}
    if chip in kernel_matrix.ASSEMBLED or chip == SCHEDULED:
        assert not list(_failing(chip, new))
    assert not (known and new), "other programs than in the results files: python benchmarks/compile_matrix.py --write"


@pytest.mark.parametrize("chip", [*kernel_matrix.ASSEMBLED, *kernel_matrix.TPUS])
def test_no_recorded_kernel_fails(chip):
    recorded = {at[1]: outcome for at, outcome in _recorded().items() if at[0] == chip}
    rows = {row: recorded.pop(str(row)) for row in kernel_matrix.rows() if str(row) in recorded}
    assert rows and not recorded
    if chip in kernel_matrix.ASSEMBLED:
        releases = [{kernel.assembler for kernel in outcome.kernels} for outcome in rows.values()]
        assert all(by == releases[0] for by in releases) and len(releases[0]) == 2
    assert not list(_failing(chip, rows))


def _failing(chip, outcomes):
    return _idle(outcomes) if chip in kernel_matrix.TPUS else _slow(chip, outcomes)


def _slow(chip, outcomes):
    """Yield kernels that are slower than memory, tensor cores or exponentials require.

    Float32 is exempt: attention and products in float32 are for checking, and a row of 32768 with its gradient fills
    all registers.
    """
    for row, outcome in outcomes.items():
        # Mosaic GPU reports nothing for kernels that an earlier test has compiled.
        assert len(outcome.kernels) > 1 or row.implementation == "mosaic_gpu", row
        if row.case.dtypes[0] == "float32":
            continue
        # Linear attention multiplies too, states that come from memory.
        multiplies = str(row).startswith((*kernel_tables.CACHED, "gated_delta_rule", "state_space"))
        for kernel in outcome.kernels:
            where = f"{row}: {kernel}"
            if row.operation.name == "paged_attention" and not kernel.name.startswith("paged_attention"):
                continue  # XLA puts a few queries in another order
            products = {PRODUCTS[chip] if multiplies else ""}
            if kernel.name == "paged_attention" or kernel.name in _QUANTIZED and not multiplies:
                products = {PRODUCTS[chip], "mma.sync"}  # of few rows, the smallest tiles alone
            if kernel.name == "paged_attention_mosaic_gpu_kernel":
                products = {PRODUCTS[chip]}
            if kernel.spilled > _allowed_spills(kernel, chip):
                yield f"{where}: spills"
            if kernel.remarks:
                yield f"{where}: its products wait for each other"
            named = _with_operands(kernel, row)
            if (kernel.done_to_needed or 1) > REPEATED.get((named, chip), (REPEATED_ELSEWHERE, ""))[0]:
                yield f"{where}: multiplies {kernel.done_to_needed:.2f} times what it needs"
            if kernel.products not in products:
                yield f"{where}: multiplies by {kernel.products or 'nothing'}"
            known = Target.parse(kernel_matrix.CHIPS[chip]).chip
            if sass.supports(known) and kernel.name not in ELIMINATING:
                busy = sass.cycles(known, kernel.hot, cached=str(row).startswith(kernel_tables.CACHED))
                least = max(busy.get(unit, 0) for unit in ("MEMORY", "TENSOR", "SPECIAL"))
                if max(busy.values()) > BUSIER.get((named, chip), (MOST_RELATIVE_CYCLES, ""))[0] * least:
                    yield f"{where}: too many instructions"
            if (
                kernel.reads < READS.get(named, 16)
                or kernel.writes < 16
                and not kernel.name.endswith(("statistics", "join"))
            ):
                yield f"{where}: narrow"


def _with_operands(kernel, row):
    """Return the name of a kernel for the tables above; of paged attention also what its pages hold."""
    if kernel.name != "paged_attention":
        return kernel.name
    if "latents" in row.case.name:
        return f"{kernel.name} of latents"
    return f"{kernel.name} of bytes" if row.case.name.endswith(("int8", "fp8")) else kernel.name


def _allowed_spills(kernel, chip):
    """Return the bytes that a kernel may spill; for a release of the assembler that is not in the table, the most."""
    by_release, _ = SPILLED.get((kernel.name, chip), ({}, ""))
    return by_release.get(kernel.assembler, max(by_release.values(), default=SPILLED_ELSEWHERE))


def _idle(outcomes):
    """Yield attention kernels that leave the matrix units idle.

    On v6e and later the matrix units are so fast that the work between products dominates, especially if the head dim
    fills less than half of them.
    """
    for row, outcome in outcomes.items():
        both = row.case.differentiable() and not row.operation.gradients_by_xla
        assert len(outcome.kernels) >= (2 if both else 1), row
        if row.operation.name == "flash_attention":
            yield from (f"{row}: {kernel}" for kernel in outcome.kernels if kernel.busy["MXU"] < LEAST_PRODUCTS)


@ELSEWHERE
def test_a_kernel_that_does_not_fit_fails(constant, monkeypatch):
    """Sixteen stages of a product's tiles exceed the shared memory of an A100."""
    (row,) = (r for r in kernel_matrix.rows() if r.implementation == "triton" and r.case.name == "4096³, GELU")
    too_deep = triton.MatmulTritonBlocks(128, 256, 64, warps=8, stages=16)
    constant(triton, "default_blocks", lambda *arguments: too_deep)
    monkeypatch.setattr(kernel_matrix, "rows", lambda: [row])
    assert "hared memory" in kernel_matrix.compile_rows("A100")[row].problem


def _page(name):
    return (RESULTS / f"{name}.md").read_text()


def test_the_page_has_the_whole_table():
    """After a change of operations, cases or chips: python benchmarks/compile_matrix.py --write"""
    everywhere = {
        chip: {
            row: kernel_matrix.Outcome("")
            for row in kernel_matrix.rows()
            if chip in kernel_matrix.LOWERED_FOR[row.implementation]
        }
        for chip in kernel_matrix.CHIPS
    }
    assert kernel_tables.compiled(everywhere) == _page("compile_matrix")
    assert _recorded().keys() == {(chip, str(row)) for chip, by in everywhere.items() for row in by}


@pytest.mark.parametrize("name, tables", [("assembly", ("registers", "loops")), ("schedules", ("schedules",))])
def test_the_pages_agree_with_the_results_files(name, tables):
    """Registers and loops of machine code, bundles of schedules: python benchmarks/compile_matrix.py --write"""
    records = _of(name)["kernels"]
    assert all(getattr(kernel_tables, table)(records) == _page(table) for table in tables)
    rows = {str(row) for row in kernel_matrix.rows() if (row.implementation == "mosaic_tpu") == (name == "schedules")}
    assert {record["row"] for record in records} == rows
