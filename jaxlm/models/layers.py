"""The way of a pass through the layers: which of them one body runs, in which loops, and the loop itself.

What is stacked (`jaxlm.models.stacks`) and what runs in one loop are separate questions. A loop goes over the shortest
period in which layers repeat.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxlm.core.errors import InputError
from jaxlm.models.block_config import BlockConfig
from jaxlm.models.execution_config import ExecutionConfig, Remat
from jaxlm.models.positions import traced_structure
from jaxlm.models.recording import is_recording
from jaxlm.models.rows import Auxiliary, LayerIndex
from jaxlm.models.stacks import Groups, Stacks, places
from jaxlm.parallel.partition import gathers_parameters


class Segment(NamedTuple):
    """Layers from `start` on: `period` of them, `repeats` times."""

    start: int
    period: int
    repeats: int


def segments(keys: Sequence[Any], start: int = 0) -> list[Segment]:
    """Return the segments in which layers with these keys, the first of which is `start`, repeat.

    A segment has the shortest period that occurs at least twice and repeats until less than a period is left, which is
    divided in the same way. Where there is none, it is the first run of equal keys.
    """
    divided, at = [], 0
    while left := keys[at:]:
        n = len(left)
        periods = (p for p in range(1, n // 2 + 1) if all(left[i] == left[i % p] for i in range(n // p * p)))
        if period := next(periods, None):
            divided.append(Segment(start + at, period, n // period))
        else:
            divided.append(Segment(start + at, 1, next((i for i in range(n) if left[i] != left[0]), n)))
        at += divided[-1].period * divided[-1].repeats
    return divided


Layer = Callable[[Any, Any, LayerIndex], tuple[Any, Auxiliary]]
Entries = Mapping[str, Sequence[int]]


class LayerRun(NamedTuple):
    """The layers that one body runs, one in each trip of a loop. Their indices are evenly spaced.

    `layers`: from 0. `stack` and `indices`: the stack of their parameters, and where they are in it. `entry` and
    `entry_indices`: the entry of a cache that serves them, and where in it. `blocks`: of one `traced_structure`.
    """

    layers: tuple[int, ...]
    stack: str
    indices: tuple[int, ...]
    entry: str
    entry_indices: tuple[int, ...]
    blocks: tuple[BlockConfig, ...]

    @property
    def distinct(self) -> tuple[BlockConfig, ...]:
        """The blocks, each once."""
        return tuple(dict.fromkeys(self.blocks))

    @property
    def which(self) -> list[int]:
        """The index of each trip's block among the distinct ones."""
        return [self.distinct.index(block) for block in self.blocks]


LayerLoop = tuple[LayerRun, ...]  # each trip runs a layer of every run, in this order


class Traversal(NamedTuple):
    """The way of one pass through the layers.

    `sections`: loops in layer order; those of one section stand together in the body of a loop of one trip. `slices`:
    a loop takes a slice of a stack of which it runs a part; otherwise each layer is read where it lies. `saved`: the
    names of what a layer keeps for its backward pass; None keeps all.
    """

    sections: tuple[tuple[LayerLoop, ...], ...]
    slices: bool
    saved: Sequence[str] | None


class Slots(NamedTuple):
    """The places of a stage of a pipeline for layers that one body runs.

    `parameters`: [slots, …] of each. `trips`: which of the layers it runs, int32 [slots]; a slot of a trip that the
    layers have not is idle, and hands on what it is given.
    """

    parameters: Any
    trips: jax.Array


def traversal(
    groups: Groups,
    remat: Remat = "none",
    entries: Entries | None = None,
    in_loop: bool = True,
    layers: range | None = None,
) -> Traversal:
    """Return the way of a pass through the layers, or through some that follow one another; `entries` are the layers of
    each entry of its cache, if it has one. `in_loop`: whether equal layers run in a loop.

    Passes differ here, and nowhere else:

    - In training, layers of one `traced_structure` share a body, and loops take slices: the gradient of what is read
      from a stack would be as large as the stack, in every layer.
    - With a cache, only equal blocks do, and nothing is sliced: a slice would be a copy of parameters.
    - Unrolled layers run one by one.
    - A recording has one body for each block of a loop of the recorded pass, and marks layers as what may run again.
      If that pass writes layers out, the first layer of each block has a body of its own: gradients may not reach what
      it reads, although they reach its result and so all later layers.
    """
    is_recorded, blocks = is_recording(), groups.blocks
    first, last = (0, len(blocks)) if layers is None else (layers.start, layers.stop)
    keys: Sequence[Any] = [traced_structure(block) for block in blocks] if entries is None else blocks
    keys = range(len(blocks)) if groups.unrolled else keys
    sections = [[segment] for segment in segments(keys[first:last], first)]
    if is_recorded:
        ranges = [(start, start + period * repeats) for ((start, period, repeats),) in sections]
        sections = [segments(blocks[start:end], start) for start, end in ranges]
        if not in_loop:
            sections = [[part] for section in sections for segment in section for part in _first_apart(segment)]
    of_stack = places(dict(groups.stacks))
    of_entry = places({"layers": range(len(blocks))} if entries is None else entries)

    def run(layers: range) -> LayerRun:
        (stack, _), (entry, _) = of_stack[layers[0]], of_entry[layers[0]]
        indices, entry_indices = ([of[layer][1] for layer in layers] for of in (of_stack, of_entry))
        of_layers = [blocks[layer] for layer in layers]
        return LayerRun(tuple(layers), stack, tuple(indices), entry, tuple(entry_indices), tuple(of_layers))

    def loop(segment: Segment) -> LayerLoop:
        start, period, repeats = segment
        return tuple(run(range(start + i, start + period * repeats, period)) for i in range(period))

    keeps_all = remat == "none" and not is_recorded
    return Traversal(
        tuple(tuple(map(loop, section)) for section in sections),
        slices=entries is None and not is_recorded,
        saved=None if keeps_all else () if isinstance(remat, str) else remat,
    )


def _first_apart(segment: Segment) -> list[Segment]:
    """Return a segment as its first period and the others."""
    start, period, repeats = segment
    first, others = Segment(start, period, 1), Segment(start + period, period, repeats - 1)
    return [first, others] if others.repeats else [first]


def copied(groups: Groups) -> dict[str, Fraction]:
    """Return the share of each stack that training copies: loops that run a part of a stack read it from a slice."""
    shares, sizes = {name: Fraction(0) for name, _ in groups.stacks}, {name: len(at) for name, at in groups.stacks}
    for loop in (loop for section in traversal(groups).sections for loop in section):
        for name, layers in Counter(run.stack for run in loop for _ in run.layers).items():
            part = Fraction(layers, sizes[name])
            shares[name] += part if part < 1 else 0
    return shares


def through(
    groups: Groups,
    stacks: Stacks,
    layer: Layer,
    carry: Any,
    execution: ExecutionConfig,
    entries: Entries | None,
    layers: range | None = None,
) -> tuple[Any, Auxiliary]:
    """Carry a value through the layers, or some that follow one another. Return it and their auxiliary results by name,
    in layer order.

    Args:
      stacks: the parameters, as `Groups.stacked` returned them.
      layer: takes a block, the value and the layer's index, and returns the value and auxiliary results.
      execution: remat is per layer; unless `in_loop` all layers are written out.
      entries: the layers of each entry of a cache that keeps something.
    """
    way, trees = traversal(groups, execution.remat, entries, execution.in_loop, layers), groups.trees(stacks)
    scan = execution.in_loop or is_recording()
    loop_through = partial(_loop_through, dict(groups.graphs), trees, layer, way, scan)
    results: list[tuple[Auxiliary, ...]] = []
    for section in way.sections:

        def body(carry: Any, _: None, section: Sequence[LayerLoop] = section) -> tuple[Any, list]:
            of_loops = []
            for loop in section:
                carry, of_loop = loop_through(loop, carry)
                of_loops.append(of_loop)
            return carry, of_loops

        if len(section) == 1:
            carry, of_section = body(carry, None)
        else:  # what the loop of one trip carries is what the loop of the recorded pass does
            carry, of_section = jax.lax.scan(body, carry, length=1)
            of_section = jax.tree.map(lambda x: x[0], of_section)
        results += of_section
    return carry, _in_layer_order(results)


def main_layers(groups: Groups) -> tuple[str, range]:
    """Return the layers that the stages of a pipeline share, and the name of their stack: the longest run of one
    `traced_structure`. Raises InputError where other layers are in that stack."""
    keys = [traced_structure(block) for block in groups.blocks]
    runs = [[*run] for _, run in itertools.groupby(range(len(keys)), key=keys.__getitem__)]
    longest = tuple(max(runs, key=len))
    for name, layers in groups.stacks:
        if layers == longest:
            return name, range(longest[0], longest[-1] + 1)
    raise InputError(
        "a pipeline needs layers of one structure that follow one another, and no other layer like them: "
        "set mesh.pipeline to 1"
    )


def through_stage(
    groups: Groups, layer: Layer, carry: Any, execution: ExecutionConfig, slots: Slots
) -> tuple[Any, Auxiliary]:
    """Carry a value through the slots of a stage of the `main_layers`. Return it and the auxiliary results of each slot
    by name, [slots, …], 0 of an idle one."""
    name, layers = main_layers(groups)
    way = traversal(groups, execution.remat, in_loop=execution.in_loop, layers=layers)
    ((loop,),) = way.sections
    loop_through = partial(_loop_through, dict(groups.graphs), {name: slots.parameters}, layer, way, execution.in_loop)
    carry, (auxiliary,) = loop_through(loop, carry, slots)
    return carry, auxiliary


def _loop_through(
    graphs: Mapping[BlockConfig, nnx.GraphDef],
    trees: Mapping[str, nnx.State],
    layer: Layer,
    way: Traversal,
    scan: bool,
    loop: LayerLoop,
    carry: Any,
    slots: Slots | None = None,
) -> tuple[Any, tuple[Auxiliary, ...]]:
    """Carry a value through the layers of a loop, or through some of its trips. Return it and the auxiliary results of
    each run, [trips, …]."""
    trips, by_stack = len(loop[0].layers), {run.stack: [r for r in loop if r.stack == run.stack] for run in loop}
    in_all = trips
    if slots is not None:
        trips = len(slots.trips)

    def compute(run: LayerRun, carry: Any, tree: nnx.State, trip: jax.Array, which: jax.Array) -> tuple:
        index = LayerIndex(_at(run.layers, trip), run.distinct, which, run.entry, _at(run.entry_indices, trip))
        return layer(nnx.merge(graphs[run.blocks[0]], tree), carry, index)

    is_alone = not scan or trips == 1

    def computed(run: LayerRun) -> Callable[..., tuple[Any, Auxiliary]]:
        policies = jax.checkpoint_policies
        if way.saved is not None:
            policy = policies.save_only_these_names(*way.saved)
        elif is_alone and way.slices and gathers_parameters():
            # Without a barrier XLA merges the gathering of matrices for both passes, and all layers' stay gathered.
            policy = policies.everything_saveable
        else:
            return partial(compute, run)
        # Inside a loop nothing can be merged across iterations, so the barrier against it is needless there.
        return jax.checkpoint(partial(compute, run), policy=policy, prevent_cse=is_alone)

    def body(carry: Any, each: tuple) -> tuple[Any, tuple[Auxiliary, ...]]:
        (trip, slices, which), parameters, results = each, {}, []
        for stack, runs in by_stack.items():
            trees_of_runs = _parameters(runs, trees[stack], slices[stack], trip)
            parameters |= zip((run.layers for run in runs), trees_of_runs, strict=True)
        for i, run in enumerate(loop):
            after, auxiliary = computed(run)(carry, parameters[run.layers], trip, which[i])
            if slots is not None:
                after = jax.tree.map(partial(jnp.where, trip < in_all), after, carry)
                auxiliary = jax.tree.map(lambda x: jnp.where(trip < in_all, x, jnp.zeros_like(x)), auxiliary)
            carry = after
            results.append(auxiliary)
        return carry, tuple(results)

    which = [jnp.asarray(run.which) for run in loop]
    if slots is None:
        slices = {stack: _slices(runs, trees[stack], way.slices) for stack, runs in by_stack.items()}
        over = jnp.arange(trips), slices, which
    else:
        over = slots.trips, trees, [each[jnp.minimum(slots.trips, in_all - 1)] for each in which]
    if trips == 1:  # a loop of one trip would have gradients of what enters it, whoever asks for them
        carry, results = body(carry, jax.tree.map(lambda x: x[0], over))
        return carry, jax.tree.map(lambda x: x[None], results)
    if scan:
        return jax.lax.scan(body, carry, over)
    # A scan that unrolls calls one function for all layers, in which XLA for TPUs does not see the axes of a map over
    # devices around, and aborts. The gradient of what is unstacked is a stack.
    write, of_trips = written_out(body), []
    for each in _unstacked(over):
        carry, results = write(carry, each)
        of_trips.append(results)
    return carry, jax.tree.map(lambda *xs: jnp.stack(xs), *of_trips)


def written_out(function: Callable) -> Callable:
    """Return a function that is traced once for operands of one structure, and written out wherever it is called.

    Its operations keep their source lines, by which profiles and `jaxlm compile` name them; those of a jitted function
    that is inlined have the line of the call.
    """
    traced: dict[Any, tuple[ClosedJaxpr, Any]] = {}

    def write(*operands: Any) -> Any:
        leaves, structure = jax.tree.flatten(operands)
        key = structure, *map(jax.typeof, leaves)
        if key not in traced:
            jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*operands)
            traced[key] = jaxpr, jax.tree.structure(results)
        jaxpr, results = traced[key]
        return jax.tree.unflatten(results, jaxpr_as_fun(jaxpr)(*leaves))

    return write


def _slices(runs: Sequence[LayerRun], tree: nnx.State, may_slice: bool) -> nnx.State | None:
    """Return what a loop takes of a stack for these runs: [trips, …] of one, [trips, runs, …] of several.

    It is None where each layer is read where it lies (`Traversal.slices`), unless the loop takes the stack as it is.
    """
    trips, count, first = len(runs[0].layers), len(runs), runs[0].indices[0]
    is_whole = trips * count == len(jax.tree.leaves(tree)[0])
    if not may_slice and not (is_whole and count == 1):
        return None

    def cut(x: jax.Array) -> jax.Array:
        x = x if is_whole else x[first : first + trips * count]
        return x if count == 1 else x.reshape(trips, count, *x.shape[1:])

    return jax.tree.map(cut, tree)


def _parameters(
    runs: Sequence[LayerRun], tree: nnx.State, piece: nnx.State | None, trip: jax.Array
) -> Sequence[nnx.State]:
    """Return the parameters of each run in a trip: from its slice of their stack, or read from the stack."""
    if piece is not None:
        return [piece] if len(runs) == 1 else _unstacked(piece)
    indices = [_at(run.indices, trip) for run in runs]
    return [jax.tree.map(lambda x, i=i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree) for i in indices]


def _at(indices: Sequence[int], trip: jax.Array) -> jax.Array:
    """Return the index of a trip."""
    return indices[0] + (indices[1] - indices[0] if len(indices) > 1 else 0) * trip


def _unstacked(tree: Any) -> list[Any]:
    """Return a tree of arrays [n, …] as n trees."""
    leaves, structure = jax.tree.flatten(tree)
    return [structure.unflatten(each) for each in zip(*map(jnp.unstack, leaves), strict=True)]


def _in_layer_order(results: Sequence[tuple[Auxiliary, ...]]) -> Auxiliary:
    """Return the results of layers by name, [layers that have it, …]; `results` has those of each segment's period."""

    def together(of_segments: list[list[dict[str, jax.Array]]]) -> dict[str, jax.Array]:
        by_name: dict[str, list[jax.Array]] = {}
        for of_period in of_segments:
            for name in dict.fromkeys(name for each in of_period for name in each):
                arrays = [each[name] for each in of_period if name in each]
                mixed = jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:]) if arrays[1:] else arrays[0]
                by_name.setdefault(name, []).append(mixed)
        return {name: jnp.concatenate(arrays) if arrays[1:] else arrays[0] for name, arrays in by_name.items()}

    return Auxiliary(*(together([[getattr(x, key) for x in of] for of in results]) for key in Auxiliary._fields))
