"""The abstract tree: shapes, dtypes and logical axes of a model, without a backend or an array.

Everything that must know the parameters reads it: initialisation, sharding, weight decay, counting, checkpoints,
compilation. Trees are nested dicts whose leaves are found by path ("layers/attention/query").
"""

import difflib
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.models import lora
from jaxlm.models.adapter_set import AdapterSet
from jaxlm.models.config import ModelConfig
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.parameters import STACKED, is_adapter, is_quantized, is_state, keeps_dtype, shapes_alone
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.models.replaced import replaced
from jaxlm.models.transformer import Transformer
from jaxlm.parallel.partition import named_sharding
from jaxlm.parallel.rules import Rules

Tree = dict[str, Any]

# Axes whose entries are looked up, or are classes.
_TABLES = frozenset({"vocab", "positions"})


def abstract(
    model: ModelConfig,
    adapted: LoraConfig | AdapterSet | None = None,
    unrolled: bool = False,
    quantized: Quantization | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Return (graph, tree) of the model, or of one with adapters or quantised matrices: `nnx.merge(graph, parameters)`
    is the module. Its layers may be `unrolled`, as `unstack_layers` returns them. The module of an `AdapterSet` has the
    adapters of a step's rows beside the parameters (`MultiAdaptedMatrix.adapter`).

    The tree's leaves are `nnx.Param` with a `jax.ShapeDtypeStruct` and the metadata `axes` and `inputs` that
    `models.parameters.param` declared. Nobody may change it.
    """
    asked: Any = (model, adapted, unrolled, quantized)  # frozen, and so hashable, which pydantic does not tell
    return _abstract(*asked)


@lru_cache(maxsize=64)  # commands ask for it a dozen times
def _abstract(
    model: ModelConfig, adapted: LoraConfig | AdapterSet | None, unrolled: bool, quantized: Quantization | None
) -> tuple[nnx.GraphDef, nnx.State]:
    with shapes_alone():
        module = nnx.eval_shape(lambda: build(model, 0, adapted, unrolled, quantized))
    graph, tree, _ = nnx.split(module, nnx.Param, ...)
    return graph, tree


def read(tree: nnx.State, leaf: Callable[[nnx.Param], Any]) -> Tree:
    """Return a nested dict with leaf(parameter) for each parameter of an abstract tree."""
    return nnx.to_pure_dict(tree, extract_fn=leaf)


def shapes(tree: nnx.State, dtype: jax.typing.DTypeLike | None = None) -> Tree:
    """Return the `jax.ShapeDtypeStruct` of each parameter, as declared or in another dtype; of state and of quantised
    matrices as declared."""
    return read(
        tree, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if keeps_dtype(leaf) else dtype or leaf.dtype)
    )


def cast(tree: nnx.State, parameters: Tree, dtype: jax.typing.DTypeLike) -> Tree:
    """Return the parameters of an abstract tree in a dtype; state and quantised matrices keep theirs."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype), parameters, shapes(tree, dtype))


def shardings(tree: nnx.State, mesh: Mesh, rules: Rules | None = None) -> Tree:
    """Return the NamedSharding of each parameter, under these rules or those around."""
    return read(tree, lambda leaf: named_sharding(leaf.axes, leaf.shape, mesh, rules))


def placed(shapes: Any, shardings: Any) -> Any:
    """Return the `jax.ShapeDtypeStruct`s of a tree with the shardings of another of the same structure."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a parameter by role, as declared.

    `stack`: over like parameters, one per layer or expert. `inputs`: those that a matrix (embeddings included)
    contracts; a gain or bias has none. `outputs`: the others.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    table: bool  # a matrix with a row or column per token or position: embedding, unembedding
    kept: tuple[int, ...] = ()  # the order of a matrix that is multiplied head by head in an engine on a CPU
    is_state: bool = False  # no gradient moves it
    dtype: str | None = None  # None: that of the computation

    @property
    def looked_up(self) -> bool:
        """Return whether its inputs are entries that are looked up: an embedding, of tokens or positions."""
        return bool(self.inputs) and self.axes[self.inputs[0]] in _TABLES

    @property
    def projection(self) -> bool:
        """Return whether it is a matrix that maps channels to channels, no table: a matrix for Muon."""
        return bool(self.inputs) and not self.table

    @property
    def of_experts(self) -> bool:
        """Return whether it is many of a kind in each layer, of which a token chooses some."""
        return any(self.axes[i] == "experts" for i in self.stack)

    @property
    def of_mixture(self) -> bool:
        """Return whether it is of experts, or of the router that chooses them."""
        return self.of_experts or "routes" in self.axes

    @property
    def by_outputs(self) -> bool:
        """Return whether it is a matrix whose outputs stand before its inputs."""
        return bool(self.inputs) and bool(self.outputs) and self.outputs[0] < self.inputs[0]


def dimensions(tree: nnx.State) -> Tree:
    """Return the `Dimensions` of each parameter."""

    def of(leaf: nnx.Param) -> Dimensions:
        stack = tuple(i for i, name in enumerate(leaf.axes) if name in STACKED)
        rest = tuple(i for i, name in enumerate(leaf.axes) if name not in STACKED)
        count = sum(name not in STACKED for name in leaf.inputs)
        inputs = rest[len(rest) - count :] if leaf.get_metadata().get("by_outputs") else rest[:count]
        outputs = tuple(i for i in rest if i not in inputs)
        table = bool(leaf.inputs) and not _TABLES.isdisjoint(leaf.axes)
        kept = tuple(leaf.axes.index(name) for name in leaf.get_metadata().get("kept", ()))
        dtype = str(leaf.dtype) if is_quantized(leaf) else None
        return Dimensions(leaf.axes, leaf.shape, stack, inputs, outputs, table, kept, is_state(leaf), dtype)

    return read(tree, of)


def paths(tree: Tree) -> dict[str, Any]:
    """Return leaves by path, the keys joined by "/"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def at(tree: Tree, path: str) -> Tree:
    """Return the part of a tree below a path."""
    for name in path.split("/"):
        tree = tree[name]
    return tree


def parameter_count(model: ModelConfig) -> int:
    """Return the exact number of parameters, tied ones counted once, without state."""
    _, tree = abstract(model)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(dimensions(tree)) if not leaf.is_state)


def state_layers(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the state of a model by path, with the layers that each array [layers, …] is of."""
    graph, tree = abstract(model)
    names = dict(nnx.merge(graph, tree).groups.stacks)
    of = {path: d for path, d in paths(dimensions(tree)).items() if d.is_state}
    return {path: names[path.split("/")[1] if len(names) > 1 else "layers"] for path in of}


def build(
    model: ModelConfig,
    seed: int,
    adapted: LoraConfig | AdapterSet | None = None,
    unrolled: bool = False,
    quantized: Quantization | None = None,
) -> Transformer:
    """Return the module with initial parameters, perhaps with adapters, or with quantised matrices; inside jit, so that
    each device makes only its own shard.

    The values do not depend on the mesh. Raises InputError for a target of adapters that is none.
    """
    rngs = nnx.Rngs(params=seed)
    module = Transformer(model, rngs, unrolled)
    targets = () if adapted is None else _targets(module, adapted)
    if quantized is not None:
        chosen = _quantizable(module, quantized)
        module = replaced(module, chosen, lambda matrix: QuantizedMatrix(matrix, quantized))
        if quantized.of_unembedding:
            module.unembedding = QuantizedMatrix(_unembedding(module), quantized)
    return module if adapted is None else lora.adapt(module, adapted, targets, rngs)


def _unembedding(module: Transformer) -> nnx.Param:
    """Return the unembedding [D, V], also of a model that has none besides its embedding."""
    if isinstance(module.unembedding, nnx.Param):
        return module.unembedding
    return nnx.Param(module.embedding[...].T, axes=("embed", "vocab"), inputs=("embed",))


def targets(model: ModelConfig, adapted: LoraConfig | AdapterSet, unrolled: bool = False) -> tuple[str, ...]:
    """Return the paths of the matrices that have adapters. Raises InputError for a pattern that matches none."""
    return _targets(nnx.merge(*abstract(model, unrolled=unrolled)), adapted)


def _targets(module: Transformer, adapted: LoraConfig | AdapterSet) -> tuple[str, ...]:
    declared = paths(dimensions(nnx.state(module)))
    if isinstance(adapted, AdapterSet):
        stacked, chosen = _stacked_paths(module, declared), set(adapted.targets)
        return tuple(path for path in declared if stacked[path] in chosen)
    matrices = [path for path, d in declared.items() if d.projection and not d.of_mixture]
    mixtures = [path for path, d in declared.items() if d.projection and d.of_mixture]
    return lora.targets(adapted, matrices, mixtures, [p for p in declared if p not in (*matrices, *mixtures)])


def _stacked_paths(module: Transformer, declared: Iterable[str]) -> dict[str, str]:
    """Return the path of each parameter where layers are stacked, by its path in a module, which may be unrolled."""
    if not module.groups.unrolled:
        return {path: path for path in declared}
    stacks = nnx.merge(*abstract(module.model)).groups.stacks
    stack_of = {layer: f"layers/{name}" if len(stacks) > 1 else "layers" for name, layers in stacks for layer in layers}

    def in_stack(path: str) -> str:
        if not path.startswith("layers/"):
            return path
        _, layer, below = path.split("/", 2)
        return f"{stack_of[int(layer)]}/{below}"

    return {path: in_stack(path) for path in declared}


def _quantizable(module: Transformer, quantized: Quantization) -> tuple[str, ...]:
    """Return the paths of the targets that are quantised: matrices of layers, but for routers, whose inputs the groups
    divide. Of unrolled layers targets are those of their stacks. Raises InputError for a pattern that is of no such
    matrix."""
    declared = paths(dimensions(nnx.state(module)))
    stacked = _stacked_paths(module, declared)
    possible = {
        path: stacked[path]
        for path, d in declared.items()
        if d.projection and (d.of_experts or not (d.of_mixture or d.by_outputs))
    }
    named = list(dict.fromkeys(possible.values()))
    for i, pattern in enumerate(quantized.targets):
        if pattern != "*" and not any(fnmatchcase(path, pattern) for path in named):
            near = difflib.get_close_matches(pattern, named, 4, cutoff=0.4) or named[:4]
            raise InputError(
                f"execution.quantize_targets[{i}] = {pattern!r} is of no matrix that can be quantised, such as "
                f"{', '.join(near)}"
            )

    def is_chosen(path: str) -> bool:
        d = declared[path]
        grouped = quantized.group_of(math.prod(d.shape[i] for i in d.inputs)) is not None
        return grouped and any(fnmatchcase(possible[path], pattern) for pattern in quantized.targets)

    return tuple(filter(is_chosen, possible))


def trained(tree: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Return the adapters of an abstract tree, or of a module's, and what is not trained beside them; without adapters
    all that is not quantised, and what is."""
    adapters, rest = nnx.split_state(tree, lambda _, leaf: is_adapter(leaf), ...)
    if adapters:
        return adapters, rest
    quantized, rest = nnx.split_state(tree, lambda _, leaf: is_quantized(leaf), ...)
    return rest, quantized


def joined(*trees: Tree) -> Tree:
    """Return one tree with the leaves of all of these, none of which is in two."""
    union: Tree = {}
    for tree in trees:
        for name, below in tree.items():
            union[name] = joined(union[name], below) if name in union else below
    return union


def under_adapters(parameters: Tree, paths: Iterable[str]) -> Tree:
    """Return the parameters of a model as those beside the adapters of the matrices at these paths."""
    chosen = {tuple(path.split("/")) for path in paths}

    def moved(tree: Any, above: tuple[str, ...]) -> Any:
        if above in chosen:
            return {"base": tree}
        return {name: moved(below, (*above, name)) for name, below in tree.items()} if isinstance(tree, dict) else tree

    return moved(parameters, ())


def merged(
    model: ModelConfig,
    adapted: LoraConfig,
    whole: Tree,
    mesh: Mesh,
    rules: Rules,
    quantized: Quantization | None = None,
) -> Tree:
    """Return the parameters of the model with its adapters added to the base: each matrix is W + scale · A·B.

    They are in the dtypes of the base, but float32 where it is `quantized`, and sharded by these rules. `whole` has
    base and adapters, and is donated.
    """
    graph, _ = abstract(model, adapted, quantized=quantized)
    _, plain = abstract(model)

    def merge(whole: Tree) -> Tree:
        return parameters(lora.merge(nnx.merge(graph, whole)))

    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # on a CPU
        return jax.jit(merge, donate_argnums=0, out_shardings=shardings(plain, mesh, rules))(whole)


def unstack_layers(model: ModelConfig, parameters: Tree) -> Tree:
    """Return the parameters of a model with each layer by itself, [1, …], under its number.

    A step without a loop over layers would copy each layer from its stack, every time. No buffer is donated. Layers of
    arrays on one CPU device are views, of NumPy.
    """
    groups = nnx.merge(*abstract(model)).groups
    layers, unstacked = parameters["layers"], {}
    for name, members in groups.stacks:
        stack = layers if len(groups.stacks) == 1 else layers[name]
        leaves, structure = jax.tree.flatten(jax.tree.map(host_view, stack))
        for i, layer in enumerate(members):
            unstacked[str(layer)] = structure.unflatten([_layer_of(x, i) for x in leaves])
    return {**parameters, "layers": unstacked}


def host_view(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Return NumPy's view of an array on one CPU device, which is sliced and turned without a program to be compiled;
    any other array as it is."""
    is_view = isinstance(x, jax.Array) and len(x.devices()) == 1 and next(iter(x.devices())).platform == "cpu"
    return np.asarray(x) if is_view else x


def _layer_of(stack: jax.Array | np.ndarray, layer: int) -> jax.Array | np.ndarray:
    """Return a layer of a stack, [1, …]."""
    return stack[layer : layer + 1] if isinstance(stack, np.ndarray) else _sliced(stack, layer)


@jax.jit
def _sliced(stack: jax.Array, layer: int) -> jax.Array:
    """Return a layer of a stack, [1, …]: one program for all layers."""
    return jax.lax.dynamic_slice_in_dim(stack, layer, 1)


def init(model: ModelConfig, seed: int, mesh: Mesh) -> Tree:
    """Return initial parameters, float32, sharded on the mesh."""
    _, tree = abstract(model)
    with jax.set_mesh(mesh):
        make = jax.jit(lambda: parameters(build(model, seed)), out_shardings=shardings(tree, mesh))
        return make()


def parameters(module: Transformer) -> Tree:
    """Return the parameters of a module as a nested dict."""
    return nnx.to_pure_dict(nnx.state(module))
