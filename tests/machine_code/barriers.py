"""Barriers of thread blocks, and mbarriers, which count arrivals and bytes in phases."""

import numpy as np
from machine_code.blocks import ThreadBlocks
from machine_code.memory import AccessError
from machine_code.ptx import PtxInstruction

_I32, _U32 = np.dtype(np.int32), np.dtype(np.uint32)


class Mbarriers:
    """The mbarriers of all thread blocks: the arrivals and bytes that the current phase of each still lacks.

    `local` is the index of a block among those emulated, `address` an mbarrier's in its shared memory.
    """

    def __init__(self, blocks: ThreadBlocks) -> None:
        self._blocks = blocks
        # [arrivals of a phase, arrivals lacking, bytes lacking, phases that ended]
        self._phases: dict[tuple[int, int], list[int]] = {}

    def begin(self, local: int, address: int, arrivals: int) -> None:
        """Initialize an mbarrier (mbarrier.init)."""
        if address % 8:
            raise AccessError("an mbarrier is not aligned to 8 bytes")
        self._phases[local, address] = [arrivals, arrivals, 0, 0]

    def forget(self, local: int, address: int) -> None:
        """Invalidate an mbarrier (mbarrier.inval)."""
        self._phase(local, address)
        del self._phases[local, address]

    def change(self, local: int, address: int, arrivals: int, expected: int) -> None:
        """Count arrivals, and bytes that are expected in addition or, where negative, arrived."""
        phase = self._phase(local, address)
        phase[1] -= arrivals
        phase[2] += expected
        if phase[1] < 0:
            raise AccessError("more threads arrive than an mbarrier expects")
        if phase[1] == phase[2] == 0:
            phase[1] = phase[0]
            phase[3] += 1
            self._blocks.wake(local)

    def ended(self, local: int, address: int, parity: int) -> bool:
        """Return whether the last phase of this parity ended."""
        return self._phase(local, address)[3] % 2 != parity

    def _phase(self, local: int, address: int) -> list[int]:
        if (local, address) not in self._phases:
            raise AccessError(f"there is no mbarrier at {address}")
        return self._phases[local, address]

    def mbarrier(self, instruction: PtxInstruction, active: np.ndarray | None) -> None:
        """Execute mbarrier.*."""
        blocks, operands = self._blocks, instruction.operands
        chosen = np.flatnonzero(blocks.chosen(active))
        match instruction.modifiers:
            case ("init", *_):
                addresses, counts = blocks.addresses(operands[0]), blocks.values(operands[1], _U32)
                for thread in chosen:
                    self.begin(int(blocks.local[thread]), int(addresses[thread]), int(counts[thread]))
            case ("inval", *_):
                for thread in chosen:
                    self.forget(int(blocks.local[thread]), int(blocks.addresses(operands[0])[thread]))
            case ("arrive", *how):
                _, place, *rest = operands
                ones = np.ones(chosen.size, np.int64)
                count = blocks.values(rest[0], _U32)[chosen].astype(np.int64) if rest else ones
                expects = "expect_tx" in how
                pairs = np.stack([blocks.local[chosen], blocks.addresses(place)[chosen].astype(np.int64)])
                for local, address in np.unique(pairs, axis=1).T:
                    these = np.all(pairs == [[local], [address]], axis=0)
                    total = int(count[these].sum())
                    arrivals, expected = (int(these.sum()), total) if expects else (total, 0)
                    self.change(int(local), int(address), arrivals, expected)
            case ("try_wait", "parity", *_):
                target, place, parity, *_ = operands
                addresses, parities = blocks.addresses(place), blocks.values(parity, _U32)
                ended = np.zeros(blocks.count, bool)
                if np.any(parities[chosen] > 1):
                    raise AccessError("the parity of a phase must be 0 or 1")
                for asked in {(int(blocks.local[i]), int(addresses[i]), int(parities[i])) for i in chosen}:
                    local, address, odd = asked
                    these = (blocks.local[chosen] == local) & (addresses[chosen] == address) & (parities[chosen] == odd)
                    ended[chosen[these]] = self.ended(local, address, odd)
                blocks.write(target, ended, active)
                asking = np.zeros(blocks.count, bool)
                asking[chosen] = True
                blocks.ask_for_phase(asking, ended, instruction)
            case _:
                raise blocks.unknown(instruction)


def _bar(blocks: ThreadBlocks, instruction: PtxInstruction, active: np.ndarray | None) -> None:
    if instruction.modifiers[0] == "warp":
        return  # a warp's threads run together
    if "sync" not in instruction.modifiers:
        raise blocks.unknown(instruction)
    barrier, *count = instruction.operands
    expected = blocks.values(count[0], _I32) if count else None
    if expected is not None and np.any(expected[blocks.chosen(active)] % 32):
        raise AccessError("a barrier must expect whole warps")
    blocks.wait_at(blocks.values(barrier, _I32), expected, active, instruction)


BARRIER_INSTRUCTIONS = {"bar": _bar, "barrier": _bar}
