"""Layers in groups: one stack for each structure of parameters, in layer order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlm.models.block_config import BlockConfig
from jaxlm.models.config import ModelConfig
from jaxlm.models.parameters import Module, rate_of, shapes_alone, stack
from jaxlm.models.positions import traced_structure

_ONLY = "layers"  # the name of a group that has all layers

Make = Callable[[ModelConfig, nnx.Rngs], Module]
Stacks = Module | nnx.Dict  # the only stack, or all by name


def grouped(keys: Sequence[Any], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the layers of each key, named as the first of them, or "layers" where all have one key."""
    groups: dict[Any, list[int]] = {}
    for layer, key in enumerate(keys):
        groups.setdefault(key, []).append(layer)
    return {names[layers[0]] if len(groups) > 1 else _ONLY: tuple(layers) for layers in groups.values()}


def places(groups: Mapping[str, Sequence[int]]) -> dict[int, tuple[str, int]]:
    """Return for each layer the name of its group and its index there."""
    return {layer: (name, i) for name, layers in groups.items() for i, layer in enumerate(layers)}


@dataclass(frozen=True)
class Groups:
    """The layers of a model by their parameters.

    `blocks`: of each layer. `stacks`: the name and the layers of each stack; blocks whose abstract trees are equal
    (paths, shapes and axes) have one. `graphs`: of each distinct block. `unrolled`: each layer is a stack of its own,
    and no loop runs it.
    """

    blocks: tuple[BlockConfig, ...]
    stacks: tuple[tuple[str, tuple[int, ...]], ...]
    graphs: tuple[tuple[BlockConfig, nnx.GraphDef], ...]
    unrolled: bool = False

    @classmethod
    def of(cls, model: ModelConfig, make: Make, unrolled: bool = False) -> "Groups":
        """Return the groups of a model's layers; `make` makes one."""
        with shapes_alone():
            modules = {
                block: nnx.eval_shape(partial(make, model.of(block)), nnx.Rngs(0))
                for block in dict.fromkeys(model.layers)
            }
        trees = {block: nnx.to_flat_state(nnx.state(module)) for block, module in modules.items()}
        structures = {
            block: tuple((path, leaf.shape, leaf.axes, leaf.inputs, rate_of(leaf)) for path, leaf in tree)
            for block, tree in trees.items()
        }
        if unrolled:
            stacks = {str(layer): (layer,) for layer in range(model.num_layers)}
        else:
            stacks = grouped([structures[block] for block in model.layers], model.layer_names)
        for name, layers in stacks.items():
            for layer in layers:
                modules[model.layers[layer]].name = _ONLY if unrolled or _ONLY in stacks else f"{_ONLY}/{name}"
        graphs = tuple((block, nnx.graphdef(module)) for block, module in modules.items())
        return cls(model.layers, tuple(stacks.items()), graphs, unrolled)

    def stacked(self, model: ModelConfig, make: Make, rngs: nnx.Rngs) -> Stacks:
        """Return the layers as stacks, whose parameters are [n, …]."""
        stacks = {name: _stack([self.blocks[i] for i in layers], model, make, rngs) for name, layers in self.stacks}
        return stacks[_ONLY] if _ONLY in stacks else nnx.Dict(stacks)

    def modules(self, stacks: Stacks) -> list[Any]:
        """Return the block of each layer, with the parameters of its whole stack."""
        modules = dict(zip(dict(self.graphs), self.distinct(stacks), strict=True))
        return [modules[block] for block in self.blocks]

    def distinct(self, stacks: Stacks) -> list[Any]:
        """Return each distinct block, in the order of `graphs`, with the parameters of its whole stack."""
        trees = self.trees(stacks)
        names = {self.blocks[layer]: name for name, layers in self.stacks for layer in layers}
        return [nnx.merge(graph, trees[names[block]]) for block, graph in self.graphs]

    def trees(self, stacks: Stacks) -> dict[str, nnx.State]:
        """Return the parameters of each stack."""
        return {name: nnx.state(stacks[name] if isinstance(stacks, nnx.Dict) else stacks) for name, _ in self.stacks}


def _stack(blocks: Sequence[BlockConfig], model: ModelConfig, make: Make, rngs: nnx.Rngs) -> Module:
    """Return layers with these blocks as one module; each layer's parameters begin as its own block says."""
    structures: dict[BlockConfig, list[int]] = {}
    for at, block in enumerate(blocks):
        structures.setdefault(traced_structure(block), []).append(at)
    models = [(model.of(blocks[at[0]]), len(at)) for at in structures.values()]
    parts = [stack(partial(make, each), n, rngs) for each, n in models]
    if len(parts) > 1:
        order = np.argsort(np.concatenate(list(structures.values())))
        trees = [nnx.state(part) for part in parts]
        nnx.update(parts[0], jax.tree.map(lambda *xs: jnp.concatenate(xs)[order], *trees))
    return parts[0]
