"""The recorded step as one device of a mesh runs it: local sizes, what trains, and what runs again."""

import functools
import math
from collections.abc import Set
from functools import cached_property
from typing import Any

from jaxlm.costs.counted import recorder
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.workload import Workload
from jaxlm.models.config import ModelConfig
from jaxlm.models.lora_config import LoraConfig
from jaxlm.parallel.rules import Placement, together


class DeviceStep:
    """One device of a mesh in a step: the recording, and the sizes of its values there."""

    def __init__(self, work: Workload):
        self.work = work
        self.found = recorder.record(work.model, work.kind, work.sequence, work.dropout, work.lora)
        self.answers: dict[tuple, Any] = {}

    @cached_property
    def trained(self) -> frozenset[int]:
        """The values that gradients pass; none in inference."""
        work = self.work
        if work.kind != "train":
            return frozenset()
        return _trained(work.model, work.sequence, work.dropout, work.lora, work.frozen)

    @cached_property
    def layered(self) -> frozenset[str]:
        """The paths of the parameters that layers read."""
        found = self.found
        return frozenset(
            found.parameters[value]
            for use in found.uses
            if use.layer is not None
            for value in use.operands
            if value in found.parameters
        )

    def trains(self, use: RecordedOp) -> bool:
        """Return whether gradients pass an operation."""
        return not self.trained.isdisjoint(use.results)

    def operand(self, use: RecordedOp, index: int) -> tuple[int, ...]:
        """Return the shape of an operand, for the rows of a microbatch."""
        return self.work.shape(use.marker.operands[index], use.shapes[index], use.num_query_heads)

    def result(self, use: RecordedOp, index: int = 0) -> tuple[int, ...]:
        """Return the shape of a result, for the rows of a microbatch."""
        return self.work.shape(use.marker.results[index], use.result_shapes[index], use.num_query_heads)

    def is_gathered(self, use: RecordedOp) -> bool:
        """Return whether the matrix or table of an operation is gathered for it."""
        return bool(self.gathered_over(use))

    def gathered_over(self, use: RecordedOp) -> tuple[str, ...]:
        """Return the mesh axes over which the matrix or table of an operation is gathered for it."""
        i = int(use.name != "look_up")
        return self.work.gathered_over(use.marker.operands[i], use.shapes[i])

    def placed(self, use: RecordedOp, index: int) -> Placement:
        """Return the mesh axes that shard each dimension of an operand as the operation reads it."""
        return self.work.placed(use.marker.operands[index], use.shapes[index], use.num_query_heads)

    def matrix(self, use: RecordedOp) -> int:
        """Return the numbers of the matrix or table that an operation multiplies by or looks up, gathered."""
        return math.prod(self.operand(use, int(use.name != "look_up")))

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The size of each value that an operation reads or makes, but of parameters."""
        found: dict[int, int] = {}
        for use in self.found.uses:
            for index, value in enumerate(use.operands):
                if value not in found and value not in self.found.parameters:
                    found[value] = math.prod(self.operand(use, index))
            found.update({value: math.prod(self.result(use, i)) for i, value in enumerate(use.results)})
        return found

    def same(self, value: int) -> int:
        """Return the value whose buffer it is: what is whole already is not gathered."""
        return self._aliases.get(value, value)

    @cached_property
    def _aliases(self) -> dict[int, int]:
        gathers = (use for use in self.found.uses if use.name == "gather")
        pairs = ((use.results[0], use.operands[0]) for use in gathers)
        return {whole: part for whole, part in pairs if self.numbers[whole] == self.numbers[part]}

    def copied_heads(self, use: RecordedOp) -> int:
        """Return the key/value heads of a product that several devices compute the same of; 0 where none do."""
        if use.name != "linear" or use.num_query_heads is None:
            return 0
        size = dict(zip(use.marker.operands[1], use.shapes[1], strict=True))["kv_heads"]
        return size if size % self.work.shards("act_heads", use.num_query_heads) else 0

    def shares_norm(self, use: RecordedOp) -> tuple[str, ...]:
        """Return the mesh axes that shard what a norm is over. Key/value heads are copied as query heads need them."""
        return together(self.placed(use, 0)[-use.options["dimensions"] :])


@functools.lru_cache(maxsize=2048)
def device_step(work: Workload) -> DeviceStep:
    """Return a device of a step."""
    return DeviceStep(work)


def replicated_kv_heads(work: Workload) -> list[int]:
    """Return the numbers of key/value heads that the mesh does not divide: several devices compute the same."""
    step = device_step(work)
    return sorted({heads for use in step.found.uses if (heads := step.copied_heads(use))})


@functools.lru_cache(maxsize=256)
def _trained(
    model: ModelConfig, sequence: int, dropout: bool, lora: LoraConfig | None, frozen: Set[str]
) -> frozenset[int]:
    return recorder.record(model, "train", sequence, dropout, lora).trained(frozen)
