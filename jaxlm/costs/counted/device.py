"""The recorded step as one device of a mesh runs it: local sizes, declared costs, and what trains."""

import functools
from collections.abc import Iterable, Set
from functools import cached_property
from typing import Any, NamedTuple

from jaxlm.costs import local_shapes
from jaxlm.costs.counted import recorder
from jaxlm.costs.counted.recorder import RecordedOp
from jaxlm.costs.memoized import memoized_in
from jaxlm.costs.workload import Workload
from jaxlm.models.doors.cost import DoorCost, Local, LocalArray
from jaxlm.models.logical_axes import Axes
from jaxlm.parallel.rules import Placement, together


class _PlacedArray(NamedTuple):
    """An array on one device for any number of rows. `rows`: the logical axis of rows and its dimension, or None."""

    value: int
    shape: tuple[int, ...]
    rows: tuple[str, int] | None
    dtype: str | None
    sharded: tuple[bool, ...]


class DeviceStep:
    """One device of a mesh in a step: the recording, and the cost of each door on that device.

    Results are kept in `answers`, in `answers_of_rows`, which steps with the same local computation share, and in
    `answers_on_mesh`, which steps of one model on one mesh share.
    """

    def __init__(self, work: Workload):
        self.work = work
        self.answers: dict[tuple, Any] = {}
        layout, dtypes = work.representative().layout, (work.dtype, work.page_dtype)
        if work.kind == "train":
            forward = _recorded(work)
            self.recording, self._sections = recorder.record(*forward), ()
        else:
            forward = work.model, work.page, work.quantized, work.cache_dtype
            self.recording, self._sections = recorder.record_engine(*forward), work.sections
        self._placed = _placed_arrays(*forward, work.rules, layout, work.row_shards())
        of_rows = work.rows(), work.draws(), self._sections, dtypes, *work.target, work.execution.context_parallel
        self._costs, self.answers_of_rows = _shared(*forward, work.rules, work.frozen, layout, *of_rows)
        self.answers_on_mesh = _shared_on_mesh(*forward, work.rules, work.frozen, work.layout, dtypes, *work.target)

    @cached_property
    def trained(self) -> frozenset[int]:
        """The values that gradients reach; none in inference."""
        work = self.work
        return _trained(work.frozen, *_recorded(work)) if work.kind == "train" else frozenset()

    @memoized_in("answers_on_mesh")
    def layered(self) -> frozenset[str]:
        """Return the paths of the parameters that layers read."""
        recorded = self.recording
        return frozenset(
            recorded.parameters[value]
            for use in recorded.uses
            if use.layer is not None
            for value in use.operands
            if value in recorded.parameters
        )

    def runs(self, use: RecordedOp) -> int:
        """Return the times that the forward pass of a door runs, and its backward pass: what follows the last layer
        runs for each microbatch, layers for each chunk of a stage too, and all but the former also where a stage is
        idle."""
        if use.results[0] in self._after_layers:
            return self.work.passes
        return self.work.stage_passes if use.layer in self.of_stages else self.work.end_passes

    def is_gathered_before(self, use: RecordedOp) -> bool:
        """Return whether the matrices of a door of a layer are gathered once a step, before all ticks of a pipeline."""
        return self.work.gathers_once and use.layer is not None and bool(self.gathered_over(use))

    @cached_property
    def in_loops(self) -> tuple[bool, ...]:
        """The layers of the recording, True for one that runs in a loop. XLA writes out a loop of a single trip."""
        work, by_layer = self.work, self.recording.by_layer
        times = (by_layer[layer][0].times for layer in range(len(self.recording.layers)))
        return tuple(work.execution.in_loop and (work.stages > 1 or each > 1) for each in times)

    @cached_property
    def of_stages(self) -> frozenset[int]:
        """The layers of the recording that lie on stages: the last ones; without a pipeline all of them."""
        slots, layers = self.work.stage_layers.slots, set()
        for layer in reversed(range(len(self.recording.layers))):
            if slots > 0:
                layers.add(layer)
                slots -= self.recording.by_layer[layer][0].times
        return frozenset(layers)

    @cached_property
    def _after_layers(self) -> frozenset[int]:
        """The first results of the doors after the last layer."""
        uses = self.recording.uses
        last = max((i for i, use in enumerate(uses) if use.layer is not None), default=-1)
        return frozenset(use.results[0] for use in uses[last + 1 :])

    def trains(self, use: RecordedOp) -> bool:
        """Return whether gradients pass a door."""
        return not self.trained.isdisjoint(use.results)

    def cost(self, use: RecordedOp) -> DoorCost:
        """Return what a door declares, for the rows of a microbatch."""
        known = self._costs.get(use.results[0])
        return (known or self._local_and_cost(use))[1]

    def saved(self, use: RecordedOp) -> tuple[int, ...]:
        """Return the values that the backward pass of a door reads."""
        declared = self.cost(use).saved
        return *(use.operands[i] for i in declared.operands), *(use.results[i] for i in declared.results)

    def local(self, use: RecordedOp) -> Local:
        """Return the arrays of a door, for the rows of a microbatch."""
        return self._local_and_cost(use)[0]

    def _local_and_cost(self, use: RecordedOp) -> tuple[Local, DoorCost]:
        key = use.results[0]
        if (known := self._costs.get(key)) is not None:
            return known
        work = self.work
        if key not in self._placed:
            self._placed[key] = self._place(use)
        operands, results = map(self._local_arrays, self._placed[key])
        training, sections = work.kind == "train", self._sections
        local = Local(
            operands, results, use.marker.options, *work.target, training, sections, work.execution.context_parallel
        )
        self._costs[key] = local, use.marker.door.declare(local)
        return self._costs[key]

    def _local_arrays(self, placed: Iterable[_PlacedArray]) -> tuple[LocalArray, ...]:
        """Return arrays on this device, for the rows of a microbatch."""
        numbers, trained, dtypes, arrays = local_shapes.rows_by_axis(self.work), self.trained, self._dtypes, []
        for value, shape, rows, dtype, sharded in placed:
            if rows is not None:
                axis, at = rows
                shape = (*shape[:at], numbers[axis], *shape[at + 1 :])
            arrays.append(LocalArray(shape, dtypes.get(dtype, dtype), sharded, value in trained))
        return tuple(arrays)

    @cached_property
    def _dtypes(self) -> dict[str | None, str]:
        """The dtypes that stand for others in a recording."""
        return {None: self.work.dtype, recorder.PAGES: self.work.page_dtype}

    def _place(self, use: RecordedOp) -> tuple[tuple[_PlacedArray, ...], tuple[_PlacedArray, ...]]:
        """Return the operands and the results of a door, for any number of rows."""
        work, heads = self.work, use.num_query_heads

        def place(value: int, axes: Axes, shape: tuple[int, ...], dtype: str | None) -> _PlacedArray:
            sharded = tuple(map(bool, local_shapes.placed(work, axes, shape, heads)))
            rows = next(((axis, axes.index(axis)) for axis in local_shapes.ROWS if axis in axes), None)
            return _PlacedArray(value, local_shapes.local_shape(work, axes, shape, heads), rows, dtype, sharded)

        operands = zip(use.operands, use.marker.operands, use.shapes, use.dtypes, strict=True)
        results = zip(use.results, use.marker.results, use.result_shapes, use.result_dtypes, strict=True)
        return tuple(place(*each) for each in operands), tuple(place(*each) for each in results)

    def gathered_over(self, use: RecordedOp) -> tuple[str, ...]:
        """Return the mesh axes over which the first parameter of a door is gathered before the door computes."""
        return self._gathered(use)[0]

    def weight_bytes(self, use: RecordedOp) -> int:
        """Return the bytes of the first parameter of a door, gathered."""
        return self._gathered(use)[1]

    def _gathered(self, use: RecordedOp) -> tuple[tuple[str, ...], int]:
        """Return what `gathered_over` and `weight_bytes` do."""
        key = use.results[0]
        if (known := self.answers_on_mesh.get(key)) is not None:
            return known
        axes: tuple[str, ...] = ()
        size = 0
        if (i := self.recording.weights.get(key)) is not None:
            axes = local_shapes.gathered_over(self.work, use.marker.operands[i], use.shapes[i])
            size = self.local(use).operands[i].bytes
        self.answers_on_mesh[key] = axes, size
        return axes, size

    def placed(self, use: RecordedOp, index: int) -> Placement:
        """Return the mesh axes that shard each dimension of an operand as the door reads it."""
        return local_shapes.placed(self.work, use.marker.operands[index], use.shapes[index], use.num_query_heads)

    def contracted_over(self, use: RecordedOp) -> tuple[str, ...]:
        """Return the mesh axes that shard a door's contracted dimensions: the result is summed over these axes."""
        if (contracted := self.cost(use).contracted) is None:
            return ()
        operand, dimensions = contracted
        placement = self.placed(use, operand)
        return together(tuple(placement[i] for i in dimensions))

    @cached_property
    def bytes(self) -> dict[int, int]:
        """The bytes of each value, except parameters, that a door reads or makes."""
        return self._bytes()

    @memoized_in("answers_of_rows")
    def _bytes(self) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for use in self.recording.uses:
            local = self.local(use)
            sizes.update({value: x.bytes for value, x in zip(use.results, local.results, strict=True)})
            for value, x in zip(use.operands, local.operands, strict=True):
                if value not in sizes and value not in self.recording.parameters:
                    sizes[value] = x.bytes
        return sizes

    def same(self, value: int) -> int:
        """Return the value whose buffer a value shares: gathering an array that is whole already makes no copy."""
        return self._aliases.get(value, value)

    @cached_property
    def _aliases(self) -> dict[int, int]:
        return self._whole_already()

    @memoized_in("answers_of_rows")
    def _whole_already(self) -> dict[int, int]:
        """Return the operand of each gathering of an array that is whole, by the result."""
        relays = (use for use in self.recording.uses if self.cost(use).relays)
        pairs = ((use.results[0], use.operands[0]) for use in relays)
        return {whole: part for whole, part in pairs if self.bytes[whole] == self.bytes[part]}

    def copied_heads(self, use: RecordedOp) -> int:
        """Return the number of a product's key/value heads if several devices compute the same heads, else 0."""
        product = self.cost(use).weight_product
        if product is None or use.num_query_heads is None:
            return 0
        size = dict(zip(use.marker.operands[product.weight], use.shapes[product.weight], strict=True)).get(
            "kv_heads", 0
        )
        return size if size % local_shapes.shards(self.work, "act_heads", use.num_query_heads) else 0


# Results that steps with the same local computation share, for the many steps of a search. A door's key is its first
# result.


@functools.lru_cache(maxsize=256)
def _placed_arrays(*_: Any) -> dict[int, tuple[tuple[_PlacedArray, ...], tuple[_PlacedArray, ...]]]:
    return {}


@functools.lru_cache(maxsize=128)
def _shared(*_: Any) -> tuple[dict[int, tuple[Local, DoorCost]], dict[tuple, Any]]:
    """Return the shared declarations of doors, and other results of one local computation."""
    return {}, {}


@functools.lru_cache(maxsize=128)
def _shared_on_mesh(*_: Any) -> dict[Any, Any]:
    """Return the shared results on one mesh: those of `DeviceStep._gathered`, and those of methods."""
    return {}


@functools.lru_cache(maxsize=128)
def device_step(work: Workload) -> DeviceStep:
    """Return one device of a step."""
    return DeviceStep(work)


def replicated_kv_heads(work: Workload) -> list[int]:
    """Return the numbers of key/value heads that the mesh does not divide, so that several devices compute the same
    heads."""
    step = device_step(work)
    return sorted({heads for use in step.recording.uses if (heads := step.copied_heads(use))})


def _recorded(work: Workload) -> tuple[Any, ...]:
    """Return the arguments of the recording of a training step. Only where something does not train may gradients pass
    the first layer otherwise than the layers after it."""
    in_loop = work.execution.in_loop or not work.frozen
    of_layers = work.stage_layers.model, work.sequence, work.dropout, work.lora, work.objective, in_loop
    return *of_layers, work.quantized, work.expert_way


@functools.lru_cache(maxsize=256)
def _trained(frozen: Set[str], *recorded: Any) -> frozenset[int]:
    return recorder.record(*recorded).trained(frozen)
