"""The bytes of kernels: what copies behind them bring to faster memory is read of device memory too."""

import meshes
import model_fixtures
import pytest
from markers import ELSEWHERE
from matrices import sampled

from jaxlm.costs.counted import operations
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import hlo, launched_kernels, report, targets

FAST, SLOW = "f32[64,32]{1,0:S(1)}", "f32[64,32]{1,0}"
BYTES = 4 * 64 * 32


def kernels(*lines: str) -> list[tuple[str, int]]:
    """Return the name and the bytes of each kernel of a program of two parameters in device memory."""
    given = "".join(f"  %p{i} = {SLOW} parameter({i})\n" for i in range(2))
    written = "".join(f"  {line}\n" for line in lines)
    program = hlo.parse(f"HloModule m\nENTRY %main (p0: f32[], p1: f32[]) -> f32[] {{\n{given}{written}}}\n")
    return [(kernel.name, kernel.bytes) for kernel in launched_kernels.kernels(program)]


def copy(name: str, operand: str, source: str = SLOW, target: str = FAST, attributes: str = "") -> tuple[str, str]:
    """Return the start and the end of a copy."""
    return (
        f"%{name}.start = ({target}, {source}, u32[]) copy-start(%{operand}){attributes}",
        f"%{name} = {target} copy-done(%{name}.start)",
    )


def test_what_is_copied_ahead_is_read_by_its_first_reader():
    """Once, whoever reads it again in faster memory."""
    found = kernels(
        *copy("fetched", "p0"),
        f"%view = {FAST} bitcast(%fetched)",
        f"%first = {FAST} negate(%view)",
        f"%second = {FAST} add(%view, %first)",
        f"ROOT %third = {SLOW} add(%second, %p1)",
    )
    assert found == [("first", BYTES), ("second", 0), ("third", 2 * BYTES)]


def test_kernels_that_do_the_same_work_are_one_with_all_runs():
    """Others of the same name do more, or something else under another source."""
    gate = launched_kernels.LaunchedKernel("layers/gate/product", "triton", "a.py:1", 16, 0, 0, 100, 5.0)
    up, again = gate._replace(name="layers/up/product"), gate._replace(count=1)
    down, elsewhere = gate._replace(bytes=101), gate._replace(source="b.py:2")
    other = gate._replace(name="layers/gate/norm")
    merged = launched_kernels.alike([gate, down, up, elsewhere, again, other])
    assert merged == [gate._replace(name="layers/gate/product and 1 alike", count=33), down, elsewhere, other]


def test_a_slice_that_is_copied_ahead_counts_alone():
    part = "f32[8,32]{1,0:S(1)}"
    found = kernels(
        f"%start = (({SLOW}), {part}, u32[]) slice-start(%p0), slice={{[0:8], [0:32]}}",
        f"%done = {part} slice-done(%start)",
        f"ROOT %first = {part} negate(%done)",
    )
    assert found == [("first", BYTES // 8)]


def test_what_is_copied_out_of_faster_memory_is_written_by_its_maker():
    found = kernels(f"%made = {FAST} negate(%p0)", *copy("out", "made", FAST, SLOW))
    assert found == [("made", 2 * BYTES)]


def test_a_copy_that_no_kernel_beside_it_reads_stands_for_itself():
    found = kernels(*copy("kept", "p0"), *copy("twice", "p1", SLOW, SLOW))
    assert found == [("kept.start", BYTES), ("twice.start", 2 * BYTES)]


def test_what_a_run_fetches_for_the_next_one_counts_once():
    found = kernels(
        *copy("fetched", "p0", attributes=", cross_program_prefetch_index=0"),
        f"%read = {FAST} negate(%fetched)",
        *copy("next", "p0"),
    )
    assert found == [("read", BYTES)]


# Weights and pages large enough that rows and their sums do not matter.
ATTENTION = {
    "latent": {**model_fixtures.LATENT["attention"], "latent_rank": 256, "rope_dim": 64, "nope_dim": 128},
    "heads": {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128},
}
FEED_FORWARD = {
    "mixture": {"kind": "mixture", "num_experts": 16, "experts_per_token": 4, "d_ff": 256, "gated": True},
    "dense": {"d_ff": 2048, "gated": True},
}


@ELSEWHERE
@pytest.mark.slow
@pytest.mark.parametrize(
    "attention, feed_forward, chips, tensor",
    sampled(
        [
            pytest.param(attention, feed_forward, chips, tensor)
            for attention in ATTENTION
            for feed_forward in FEED_FORWARD
            for chips in ("tpu-v5e:2x4", "h200-sxm:8")
            for tensor in (1, 2, 8)
        ],
        ["latent-mixture-tpu-v5e:2x4-2"],
    ),
)
def test_kernels_move_no_less_than_is_counted_at_least(attention, feed_forward, chips, tensor):
    """In a decoding step, most of whose weights a TPU's program fetches ahead."""
    model = model_fixtures.model(
        {**model_fixtures.LLAMA, "attention": ATTENTION[attention], "feed_forward": FEED_FORWARD[feed_forward]},
        **{"d_model": 512, "num_layers": 2, "vocab_size": 2048, "context_length": 1024},
    )
    experiment = model_fixtures.experiment(model, dtype="bfloat16", batch=16, sequence=1024)
    target = Target.parse(chips)
    mesh = meshes.make(data=target.devices // tensor, tensor=tensor, devices=targets.devices(target))
    found = report.compile(experiment, "decode", target, mesh).report
    least = sum(op.times * op.least_bytes for op in operations.step(found.work) if op.kind != "draw")
    assert sum(kernel.count * kernel.bytes for kernel in found.kernels) >= least
