"""The abstract tree: shapes, dtypes and logical axes of a model, without a backend or an array.

Everything that must know the parameters reads it: initialisation, sharding, weight decay, counting, checkpoints,
compilation. Trees are nested dicts whose leaves are found by path ("layers/attention/query").
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxlm.models.config import ModelConfig
from jaxlm.models.transformer import Transformer
from jaxlm.parallel.partition import named_sharding
from jaxlm.parallel.rules import TRAIN, Rules

Tree = dict[str, Any]

# Axes along which parameters are many of a kind rather than one.
_STACKED = frozenset({"layers"})
# Axes whose entries are looked up, or are classes.
_TABLES = frozenset({"vocab", "positions"})


def abstract(model: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Return (graph, tree) of the model: `nnx.merge(graph, parameters)` is the module.

    The tree's leaves are `nnx.Param` with a `jax.ShapeDtypeStruct` and the metadata `axes` and `inputs` that
    `models.parameters.param` declared.
    """
    return nnx.split(nnx.eval_shape(lambda: build(model, seed=0)))


def read(tree: nnx.State, leaf: Callable[[nnx.Param], Any]) -> Tree:
    """Return a nested dict with leaf(parameter) for each parameter of an abstract tree."""
    return nnx.to_pure_dict(tree, extract_fn=leaf)


def shapes(tree: nnx.State, dtype: jax.typing.DTypeLike | None = None) -> Tree:
    """Return the `jax.ShapeDtypeStruct` of each parameter, as declared or in another dtype."""
    return read(tree, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype))


def shardings(tree: nnx.State, mesh: Mesh, rules: Rules = TRAIN) -> Tree:
    """Return the NamedSharding of each parameter."""
    return read(tree, lambda leaf: named_sharding(leaf.axes, leaf.shape, mesh, rules))


def placed(shapes: Any, shardings: Any) -> Any:
    """Return the `jax.ShapeDtypeStruct`s of a tree with the shardings of another of the same structure."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a parameter by role, as declared.

    `stack`: over like parameters, one per layer. `inputs`: those that a matrix (embeddings included) contracts; a gain
    or bias has none. `outputs`: the others.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    table: bool  # a matrix with a row or column per token or position: embedding, unembedding

    @property
    def projection(self) -> bool:
        """Return whether it is a matrix that maps channels to channels, no table: a matrix for Muon."""
        return bool(self.inputs) and not self.table


def dimensions(tree: nnx.State) -> Tree:
    """Return the `Dimensions` of each parameter."""

    def of(leaf: nnx.Param) -> Dimensions:
        stack = tuple(i for i, name in enumerate(leaf.axes) if name in _STACKED)
        rest = tuple(i for i, name in enumerate(leaf.axes) if name not in _STACKED)
        inputs = sum(name not in _STACKED for name in leaf.inputs)
        table = bool(leaf.inputs) and not _TABLES.isdisjoint(leaf.axes)
        return Dimensions(leaf.axes, leaf.shape, stack, rest[:inputs], rest[inputs:], table)

    return read(tree, of)


def paths(tree: Tree) -> dict[str, Any]:
    """Return leaves by path, the keys joined by "/"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def parameter_count(model: ModelConfig) -> int:
    """Return the exact number of parameters, tied ones counted once."""
    _, tree = abstract(model)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(tree)))


def build(model: ModelConfig, seed: int) -> Transformer:
    """Return the module with initial parameters; inside jit, so that each device makes only its own shard.

    The values do not depend on the mesh.
    """
    return Transformer(model, nnx.Rngs(params=seed))


def init(model: ModelConfig, seed: int, mesh: Mesh) -> Tree:
    """Return initial parameters, float32, sharded on the mesh."""
    _, tree = abstract(model)
    with jax.set_mesh(mesh):
        make = jax.jit(lambda: parameters(build(model, seed)), out_shardings=shardings(tree, mesh))
        return make()


def parameters(module: Transformer) -> Tree:
    """Return the parameters of a module as a nested dict."""
    return nnx.to_pure_dict(nnx.state(module))
