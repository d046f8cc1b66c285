"""The emulator of PTX: blocks of a grid that signal to one another by counters."""

import numpy as np
import pytest
from machine_code.machine import EmulationError
from machine_code.tensor_maps import TensorMap
from matrices import sampled
from ptx_fixtures import run

# Each block replaces every word of the result by three times the word plus the block's index, after earlier blocks.
WAIT = """
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r0, 0; @!%p1 bra $go;
    $again: ld.relaxed.gpu.global.b32 %r2, [%rd0]; setp.lt.u32 %p2, %r2, %r1; @%p2 bra $again;
    fence.acquire.gpu;
    $go: bar.sync 0;
"""
CHANGE = "ld.global.b32 %r3, [%rd11]; mad.lo.u32 %r3, %r3, 3, %r1; st.global.b32 [%rd11], %r3; bar.sync 0;"
COUNT = "mov.b32 %r4, 1; @%p1 red.release.gpu.global.add.u32 [%rd0], %r4;"
# Threads reconverge at code that stands before the loop in which they wait.
BACKWARD = """
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r0, 0; bra $begin;
    $go: bar.sync 0; bra $change;
    $begin: @!%p1 bra $go;
    $again: ld.relaxed.gpu.global.b32 %r2, [%rd0]; setp.lt.u32 %p2, %r2, %r1; @%p2 bra $again;
    fence.acquire.gpu; bra $go; $change:
"""


def changed(body, blocks=5, **how):
    (result,) = run(body, np.zeros(1, np.int32), blocks=blocks, counters=1, **how)
    return result


@pytest.mark.parametrize(
    "blocks, wait, late",
    sampled(
        [
            pytest.param(blocks, wait, late, id=f"{blocks}-{name}-{late}")
            for blocks in (5, 260)  # 260 are more than are emulated together
            for name, wait in (("wait", WAIT), ("backward", BACKWARD))
            for late in (True, False)
        ],
        lambda blocks, wait, late: blocks == 5 or (wait == WAIT and not late),
    ),
)
def test_blocks_proceed_in_order(blocks, wait, late):
    expected = np.uint32(0xFFFFFFFF)
    for block in range(blocks):
        expected = np.uint32(int(expected) * 3 + block & 0xFFFFFFFF)
    np.testing.assert_array_equal(changed(wait + CHANGE + COUNT, blocks, late=late), np.full(32, expected))


def test_a_counter_may_be_read_twice():
    twice = WAIT + "ld.relaxed.gpu.global.b32 %r2, [%rd0]; ld.relaxed.gpu.global.b32 %r2, [%rd0];" + CHANGE + COUNT
    np.testing.assert_array_equal(changed(twice), changed(WAIT + CHANGE + COUNT))


@pytest.mark.parametrize("blocks, late", [(5, False), (260, True)])
def test_waiting_for_a_later_block_is_found(blocks, late):
    """A chip that holds fewer blocks than the grid has would deadlock; here it holds one, or 256."""
    from_last = f"mov.u32 %r8, %ctaid.x; sub.u32 %r1, {blocks - 1}, %r8;"
    backwards = WAIT.replace("mov.u32 %r1, %ctaid.x;", from_last)
    with pytest.raises(EmulationError, match="deadlock: .* threads wait at ld.relaxed"):
        changed(backwards + CHANGE + COUNT, blocks, late=late)


@pytest.mark.parametrize(
    "body, problem",
    [
        (WAIT.replace("fence.acquire.gpu;", "") + CHANGE + COUNT, "reads what another block wrote"),
        (WAIT.replace("fence.acquire.gpu;", "fence.acquire.cta;") + CHANGE + COUNT, "reads what another block wrote"),
        (WAIT.replace("@%p2 bra $again;", "") + CHANGE + COUNT, "two blocks write to the same place of result 0"),
        (WAIT + COUNT + CHANGE, "reads what another block wrote"),
        (WAIT + CHANGE, "deadlock: .* threads wait at ld.relaxed"),
        (BACKWARD + CHANGE, "deadlock: .* threads wait at ld.relaxed"),
        (WAIT.replace("setp.lt", "setp.le") + CHANGE + COUNT, "deadlock: .* threads wait at ld.relaxed"),
        ("ld.global.b32 %r3, [%rd0];", "reads a counter, operand 0, with a plain load"),
        ("mov.b32 %r4, 1; red.release.gpu.global.add.u32 [%rd1], %r4;", "counts in result 0, which holds no counters"),
    ],
)
def test_missing_synchronization_is_found(body, problem):
    with pytest.raises(EmulationError, match=problem):
        changed(body)


# Each block adds 32 numbers from its shared memory to the result; the first block writes them.
ADD = """
    cvt.rn.f32.u32 %r5, %r0; st.shared.b32 [%rd90], %r5; mov.b64 %rd20, kernel_param_2; mov.b32 %r6, 0; bar.sync 0;
    setp.eq.u32 %p3, %r1, 0; and.pred %p4, %p1, %p3; xor.pred %p5, %p1, %p4;
    @%p4 cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd20, {%r6}], [held];
    @%p5 cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%rd20, {%r6}], [held];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; bar.sync 0;
"""


def added(body, blocks=3, **how):
    known = TensorMap(1, np.dtype(np.float32), (32,), (1,), (32,), 16)
    results = [np.zeros(32, np.float32), np.zeros(1)]
    how = dict(counters=1, parameters=[0, 1, {0: known}]) | how
    made, _ = run(body, np.zeros(32, np.int32), results=results, blocks=blocks, **how)
    return made


def test_the_copy_engine_adds():
    np.testing.assert_array_equal(added(WAIT + ADD + COUNT), 3 * np.arange(32))


def test_waiting_for_reads_of_the_copy_engine_is_not_enough():
    with pytest.raises(EmulationError, match="another block wrote"):
        added(WAIT + ADD.replace("wait_group 0", "wait_group.read 0") + COUNT)
    with pytest.raises(EmulationError, match="exits before a copy by the engine completes"):
        added(WAIT + ADD.replace("cp.async.bulk.wait_group 0;", "") + COUNT)


# Each block adds without waiting for another.
ANYHOW = "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r0, 0;" + ADD.replace(
    "setp.eq.u32 %p3, %r1, 0;", "setp.eq.u32 %p3, 1, 0;"
)


@pytest.mark.parametrize("late", [True, False])
def test_blocks_add_to_a_sum_in_any_order(late):
    made = added(ANYHOW, 260, counters=0, sums={0: 0}, late=late)
    np.testing.assert_array_equal(made, 260 * np.arange(32))


@pytest.mark.parametrize(
    "body, problem, sums",
    [
        (ANYHOW, "reads what another block wrote to result 0", {}),  # it is no sum
        (ADD.replace("setp.eq.u32 %p3, %r1, 0;", "setp.eq.u32 %p3, %r1, %r1;"), "two blocks write", {0: 0}),
        (ANYHOW + "@%p1 ld.global.b32 %r3, [%rd1];", "reads what another block wrote to result 0", {0: 0}),
        (ANYHOW + "@%p1 st.global.b32 [%rd1], %r0;", "two blocks write to the same place of result 0", {0: 0}),
        (
            "setp.eq.u32 %p7, %r1, 0; and.pred %p7, %p7, %p1; @%p7 st.global.b32 [%rd1], %r0; bar.sync 0;" + ANYHOW,
            "adds to what another block wrote to result 0",
            {0: 0},
        ),
    ],
    ids=["to no sum", "copies", "and reads", "and writes", "after a write"],
)
def test_whatever_else_blocks_do_to_a_sum_is_found(body, problem, sums):
    begin = "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r0, 0;"
    with pytest.raises(EmulationError, match=problem):
        added(begin + body, counters=0, sums=sums)
