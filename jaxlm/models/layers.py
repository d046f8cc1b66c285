"""Layers in groups: stacks of equal parameters, and the loop through layers that differ.

What is stacked and what runs in one loop are separate questions. There is one stack per structure of parameters, in
layer order. The loop goes over the shortest period in which layers repeat.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlm.models.config import BlockConfig, ModelConfig, Remat
from jaxlm.models.parameters import Module, shapes_alone, stack
from jaxlm.models.positions import program
from jaxlm.models.recording import is_recording
from jaxlm.models.rows import Auxiliary, Place

_ONLY = "layers"  # the name of a group that has all layers


class Execution(NamedTuple):
    """The execution of the layers, which does not change their result.

    `remat`: what a layer keeps for its backward pass. `scan`: layers that repeat are compiled once, in a loop; all are
    written out otherwise.
    """

    remat: Remat = "none"
    scan: bool = True


class Segment(NamedTuple):
    """Layers from `start` on: `period` of them, `repeats` times."""

    start: int
    period: int
    repeats: int


def segments(keys: Sequence[Any]) -> list[Segment]:
    """Return the segments in which layers with these keys repeat.

    A segment has the shortest period that occurs at least twice and repeats until less than a period is left, which is
    divided in the same way. Where there is none, it is the first run of equal keys.
    """
    found, start = [], 0
    while left := keys[start:]:
        n = len(left)
        periods = (p for p in range(1, n // 2 + 1) if all(left[i] == left[i % p] for i in range(n // p * p)))
        if period := next(periods, None):
            found.append(Segment(start, period, n // period))
        else:
            found.append(Segment(start, 1, next((i for i in range(n) if left[i] != left[0]), n)))
        start += found[-1].period * found[-1].repeats
    return found


def grouped(keys: Sequence[Any], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the layers of each key, named as the first of them, or "layers" where all have one key."""
    groups: dict[Any, list[int]] = {}
    for layer, key in enumerate(keys):
        groups.setdefault(key, []).append(layer)
    return {names[layers[0]] if len(groups) > 1 else _ONLY: tuple(layers) for layers in groups.values()}


Make = Callable[[ModelConfig, nnx.Rngs], Module]
Stacks = Module | nnx.Dict  # the only stack, or all by name
Run = Callable[[Any, Any, Place], tuple[Any, Auxiliary]]
Entries = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Groups:
    """The layers of a model by their parameters.

    `blocks`: of each layer. `stacks`: the name and the layers of each stack; blocks whose abstract trees are equal
    (paths, shapes and axes) have one. `graphs`: of each distinct block. `apart`: each layer is a stack of its own,
    and runs by itself.
    """

    blocks: tuple[BlockConfig, ...]
    stacks: tuple[tuple[str, tuple[int, ...]], ...]
    graphs: tuple[tuple[BlockConfig, nnx.GraphDef], ...]
    apart: bool = False

    @classmethod
    def of(cls, model: ModelConfig, make: Make, apart: bool = False) -> "Groups":
        """Return the groups of a model's layers; `make` makes one."""
        with shapes_alone():
            made = {
                block: nnx.eval_shape(partial(make, model.of(block)), nnx.Rngs(0))
                for block in dict.fromkeys(model.layers)
            }
        trees = {block: nnx.to_flat_state(nnx.state(module)) for block, module in made.items()}
        structures = {
            block: tuple((path, leaf.shape, leaf.axes, leaf.inputs) for path, leaf in tree)
            for block, tree in trees.items()
        }
        if apart:
            stacks = {str(layer): (layer,) for layer in range(model.num_layers)}
        else:
            stacks = grouped([structures[block] for block in model.layers], model.layer_names)
        for name, layers in stacks.items():
            for layer in layers:
                made[model.layers[layer]].name = _ONLY if apart or _ONLY in stacks else f"{_ONLY}/{name}"
        graphs = tuple((block, nnx.graphdef(module)) for block, module in made.items())
        return cls(model.layers, tuple(stacks.items()), graphs, apart)

    def stacked(self, model: ModelConfig, make: Make, rngs: nnx.Rngs) -> Stacks:
        """Return the layers as stacks, whose parameters are [n, …]."""
        made = {name: _stack([self.blocks[i] for i in layers], model, make, rngs) for name, layers in self.stacks}
        return made[_ONLY] if _ONLY in made else nnx.Dict(made)

    def modules(self, stacks: Stacks) -> list[Any]:
        """Return the block of each layer, with the parameters of its whole stack."""
        made = dict(zip(dict(self.graphs), self.distinct(stacks), strict=True))
        return [made[block] for block in self.blocks]

    def distinct(self, stacks: Stacks) -> list[Any]:
        """Return each distinct block, in the order of `graphs`, with the parameters of its whole stack."""
        trees = self.trees(stacks)
        names = {self.blocks[layer]: name for name, layers in self.stacks for layer in layers}
        return [nnx.merge(graph, trees[names[block]]) for block, graph in self.graphs]

    def trees(self, stacks: Stacks) -> dict[str, nnx.State]:
        """Return the parameters of each stack."""
        return {name: nnx.state(stacks[name] if isinstance(stacks, nnx.Dict) else stacks) for name, _ in self.stacks}

    def copied(self) -> dict[str, Fraction]:
        """Return the share of each stack that training copies: loops that read a part of one read it from a slice."""
        shares, sizes = {name: Fraction(0) for name, _ in self.stacks}, {name: len(at) for name, at in self.stacks}
        places = _places(dict(self.stacks))
        for start, period, repeats in segments([program(block) for block in self.blocks]):
            for name, count in Counter(places[layer][0] for layer in range(start, start + period)).items():
                read = Fraction(count * repeats, sizes[name])
                shares[name] += read if read < 1 else 0
        return shares

    def through(
        self, stacks: Stacks, run: Run, carry: Any, execution: Execution, entries: Entries | None
    ) -> tuple[Any, Auxiliary]:
        """Carry a value through the layers. Return it and their auxiliary results by name, in layer order.

        Args:
          stacks: the parameters, as `stacked` returned them.
          run: takes a block, the value and the block's place, and returns the value and auxiliary results.
          execution: remat is per layer.
          entries: the layers of each entry of a cache that keeps something. With one, blocks that differ at all run
            apart; otherwise those of one `program` run as one, and apart in recordings, inside of that loop.
        """
        loop, found = _LayerLoop(self, stacks, run, execution, entries), []
        keys: Sequence[Any] = self.blocks if entries is not None else [program(block) for block in self.blocks]
        if self.apart:
            keys = range(len(self.blocks))
        for segment in segments(keys):
            carry, auxiliary = loop.over(segment, carry)
            found += auxiliary
        return carry, _in_layer_order(found)


def _stack(blocks: Sequence[BlockConfig], model: ModelConfig, make: Make, rngs: nnx.Rngs) -> Module:
    """Return layers with these blocks as one module; each layer's parameters begin as its own block says."""
    programs: dict[BlockConfig, list[int]] = {}
    for at, block in enumerate(blocks):
        programs.setdefault(program(block), []).append(at)
    models = [(model.of(blocks[at[0]]), len(at)) for at in programs.values()]
    parts = [stack(partial(make, each), n, rngs) for each, n in models]
    if len(parts) > 1:
        order = np.argsort(np.concatenate(list(programs.values())))
        trees = [nnx.state(part) for part in parts]
        nnx.update(parts[0], jax.tree.map(lambda *xs: jnp.concatenate(xs)[order], *trees))
    return parts[0]


class _LayerLoop:
    """The loop over the layers of a segment, of which each has its own block in the body."""

    def __init__(self, groups: Groups, stacks: Stacks, run: Run, execution: Execution, entries: Entries | None):
        self._groups, self._graphs, self._run, self._execution = groups, dict(groups.graphs), run, execution
        self._trees, self._reads = groups.trees(stacks), entries is not None or is_recording()
        self._stack = _places(dict(groups.stacks))
        self._entry = _places({_ONLY: range(len(groups.blocks))} if entries is None else entries)

    def over(self, segment: Segment, carry: Any) -> tuple[Any, list[tuple[Auxiliary, ...]]]:
        """Return the value after a segment, and the auxiliary results of each layer of its period, [repeats, …].

        In a recording of training they are those of the segments whose blocks do not differ at all.
        """
        equal = [segment]
        if is_recording():
            blocks = self._groups.blocks[segment.start : segment.start + segment.period * segment.repeats]
            equal = [Segment(segment.start + start, *rest) for start, *rest in segments(blocks)]
        if len(equal) == 1:
            carry, found = self._over(equal[0], carry)
            return carry, [found]

        def body(carry: Any, _: None) -> tuple[Any, list[tuple[Auxiliary, ...]]]:
            """Run the blocks apart, in a loop of one trip: what it carries is what the loop of training does."""
            found = []
            for each in equal:
                carry, auxiliary = self._over(each, carry)
                found.append(auxiliary)
            return carry, found

        carry, found = jax.lax.scan(body, carry, length=1)
        return carry, jax.tree.map(lambda x: x[0], found)

    def _over(self, segment: Segment, carry: Any) -> tuple[Any, tuple[Auxiliary, ...]]:
        """Run one loop over a segment, or none where it does not repeat."""
        layers = range(segment.start, segment.start + segment.period)
        inside: dict[str, list[int]] = {}  # of each stack the layers in a period
        for layer in layers:
            inside.setdefault(self._stack[layer][0], []).append(layer)
        slabs = {name: self._slab(segment, name, among) for name, among in inside.items()}
        runs = {layer: self._layer(segment, layer) for layer in layers}
        which = {layer: jnp.asarray(self._variants(segment, layer)[1]) for layer in layers}

        def body(carry: Any, each: tuple) -> tuple[Any, tuple[Auxiliary, ...]]:
            repeat, slabs, which = each
            trees = {}
            for name, among in inside.items():
                slab = slabs[name]
                if slab is None:
                    trees |= {layer: self._read(segment, layer, repeat) for layer in among}
                else:
                    trees |= zip(among, [slab] if len(among) == 1 else _unstacked(slab), strict=True)
            found = []
            for layer in layers:
                carry, auxiliary = runs[layer](carry, trees[layer], repeat, which[layer])
                found.append(auxiliary)
            return carry, tuple(found)

        over = jnp.arange(segment.repeats), slabs, which
        if segment.repeats == 1:  # a loop of one trip would have gradients of what enters it, whoever asks for them
            carry, found = body(carry, jax.tree.map(lambda x: x[0], over))
            return carry, jax.tree.map(lambda x: x[None], found)
        # `unroll` writes the loop out at trace time: the same tree, the same body, no while loop in the program.
        return jax.lax.scan(body, carry, over, unroll=1 if self._execution.scan else segment.repeats)

    def _layer(self, segment: Segment, layer: int) -> Callable[..., tuple[Any, Auxiliary]]:
        """Return the function that runs a layer of the period, by the number of the repeat."""
        graph, (blocks, _) = self._graphs[self._groups.blocks[layer]], self._variants(segment, layer)
        (entry, index), step = self._entry[layer], _step(self._entry, segment, layer)

        def run(carry: Any, tree: nnx.State, repeat: jax.Array, which: jax.Array) -> tuple[Any, Auxiliary]:
            at = Place(layer + segment.period * repeat, blocks, which, entry, index + step * repeat)
            return self._run(nnx.merge(graph, tree), carry, at)

        remat = self._execution.remat
        if remat == "none" and not is_recording():  # recordings show what rematerialisation may run again
            return run
        saved = () if isinstance(remat, str) else remat
        # Inside a loop nothing can be merged across iterations, so the barrier against it is needless there.
        return jax.checkpoint(
            run,
            policy=jax.checkpoint_policies.save_only_these_names(*saved),
            prevent_cse=not self._execution.scan or segment.repeats == 1,
        )

    def _variants(self, segment: Segment, layer: int) -> tuple[tuple[BlockConfig, ...], list[int]]:
        """Return the distinct blocks that a layer of the period may be, and which it is in each repeat."""
        of_repeats = [self._groups.blocks[layer + segment.period * repeat] for repeat in range(segment.repeats)]
        blocks = tuple(dict.fromkeys(of_repeats))
        return blocks, [blocks.index(block) for block in of_repeats]

    def _slab(self, segment: Segment, name: str, among: Sequence[int]) -> nnx.State | None:
        """Return what a loop reads of a stack, [repeats, …], for several layers of a period [repeats, layers, …].

        It is None where layers are read where they lie: in inference a slice would be a copy of the parameters. In
        training the gradient of what is read so would be as large as the stack, in every layer.
        """
        repeats, count, (_, first) = segment.repeats, len(among), self._stack[among[0]]
        whole = repeats * count == len(dict(self._groups.stacks)[name])
        if self._reads and not (whole and count == 1):
            return None

        def cut(x: jax.Array) -> jax.Array:
            x = x if whole else x[first : first + repeats * count]
            return x if count == 1 else x.reshape(repeats, count, *x.shape[1:])

        return jax.tree.map(cut, self._trees[name])

    def _read(self, segment: Segment, layer: int, repeat: jax.Array) -> nnx.State:
        """Return the parameters of a layer of the period, read from its stack."""
        (name, first), step = self._stack[layer], _step(self._stack, segment, layer)
        index = first + step * repeat
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), self._trees[name])


def _places(groups: Entries) -> dict[int, tuple[str, int]]:
    """Return for each layer the name of its group and its index there."""
    return {layer: (name, i) for name, layers in groups.items() for i, layer in enumerate(layers)}


def _step(places: Mapping[int, tuple[str, int]], segment: Segment, layer: int) -> int:
    """Return how far on in its group the same layer of the next period is."""
    return 0 if segment.repeats == 1 else places[layer + segment.period][1] - places[layer][1]


def _unstacked(tree: nnx.State) -> list[nnx.State]:
    """Return a tree of arrays [n, …] as n trees."""
    leaves, structure = jax.tree.flatten(tree)
    return [structure.unflatten(each) for each in zip(*map(jnp.unstack, leaves), strict=True)]


def _in_layer_order(found: Sequence[tuple[Auxiliary, ...]]) -> Auxiliary:
    """Return the results of layers by name, [layers that have it, …]; `found` has those of each segment's period."""

    def together(of_segments: list[list[dict[str, jax.Array]]]) -> dict[str, jax.Array]:
        by_name: dict[str, list[jax.Array]] = {}
        for of_period in of_segments:
            for name in dict.fromkeys(name for each in of_period for name in each):
                arrays = [each[name] for each in of_period if name in each]
                mixed = jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:]) if arrays[1:] else arrays[0]
                by_name.setdefault(name, []).append(mixed)
        return {name: jnp.concatenate(arrays) if arrays[1:] else arrays[0] for name, arrays in by_name.items()}

    losses, statistics = ([[getattr(x, key) for x in period] for period in found] for key in Auxiliary._fields)
    return Auxiliary(together(losses), together(statistics))
