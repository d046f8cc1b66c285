"""Weights as the engine keeps them: each layer by itself, and matrices on a CPU by their outputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.models import tree
from jaxlm.models.adapter_set import AdapterSet
from jaxlm.models.config import ModelConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.transformer import Transformer
from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.partition import named_sharding
from jaxlm.parallel.rules import Rules


class WeightLayout:
    """The form in which the engine keeps the parameters of a model.

    A step that ran a loop over stacked layers would copy each layer, or on a CPU convert all layers. On a CPU a matrix
    by its outputs, [out, in], is multiplied by one kernel whatever the number of rows, so that a row's result does not
    depend on what shares its step; by its inputs the kernel changes with the number of rows. Of matrices that are
    multiplied head by head, [heads, in, out], it does not.

    On a TPU tables and matrices of experts are kept row by row, as lookups and kernels read them. By itself a TPU keeps
    an array in the order of dimensions that its tiles pad least, and a step would copy these.

    Args:
      by_outputs: whether matrices are [out, in].
      quantized: the form of the matrices of layers, where they are quantised.
      quantized_by_outputs: whether these are [out, in].
      adapters: those beside the matrices.
    """

    def __init__(
        self,
        model: ModelConfig,
        by_outputs: bool,
        quantized: Quantization | None = None,
        quantized_by_outputs: bool = False,
        adapters: AdapterSet | None = None,
    ):
        self.model, self.by_outputs, self._quantized_by_outputs = model, by_outputs, quantized_by_outputs
        self._graph, self._abstract = tree.abstract(model, adapters, True, quantized)
        self._dimensions = tree.paths(tree.dimensions(self._abstract))
        self._adapted = () if adapters is None else tree.targets(model, adapters, unrolled=True)

    def stored(self, parameters: Tree, mesh: Mesh, rules: Rules) -> Tree:
        """Return the parameters as they are kept, on the mesh as these rules have it."""

        def kept(path: tuple, x: jax.Array | np.ndarray) -> jax.Array:
            of = self._dimensions[_name(path)]
            sharding = self._sharding(of, mesh, rules)
            if not self._is_turned(of):
                return jax.device_put(x, _placement(of, sharding))
            return _turned(tree.host_view(x), of, sharding)

        return jax.tree_util.tree_map_with_path(kept, tree.unstack_layers(self.model, parameters))

    def abstract_stored(self, dtype: jnp.dtype, mesh: Mesh, rules: Rules) -> Tree:
        """Return the shapes and shardings of parameters as they are kept."""

        def kept(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            of, shape = self._dimensions[_name(path)], x.shape
            if self._is_turned(of):
                shape = tuple(math.prod(of.shape[i] for i in some) for some in self._order(of))
            sharding = self._sharding(of, mesh, rules)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=_placement(of, sharding))

        return jax.tree_util.tree_map_with_path(kept, tree.shapes(self._abstract, dtype))

    def shapes(self) -> Transformer:
        """Return the model with the shapes of its parameters."""
        return self._merged(tree.shapes(self._abstract), jax.ShapeDtypeStruct((1,), jnp.int32))

    def module(self, stored: Tree, adapter_R: jax.Array | None = None) -> Transformer:
        """Return the model with these parameters, inside of a step: XLA multiplies the arrays as they are kept.

        `adapter_R`: int32, the adapter of each row of the step, from 1 on, and 0 for none; None where there are none.
        """

        def declared(path: tuple, x: jax.Array) -> jax.Array:
            of = self._dimensions[_name(path)]
            if self._is_turned(of) and of.kept:
                x = x.transpose([of.kept.index(i) for i in sorted(of.kept)])
                return x.reshape(of.shape)
            return x.T.reshape(of.shape) if self._is_turned(of) else x

        of_layer = None if adapter_R is None else adapter_R[None]
        return self._merged(jax.tree_util.tree_map_with_path(declared, stored), of_layer)

    def _merged(self, parameters: Tree, adapter: Any) -> Transformer:
        for path in self._adapted:
            tree.at(parameters, path)["adapter"] = adapter
        return nnx.merge(self._graph, parameters)

    def _sharding(self, of: Dimensions, mesh: Mesh, rules: Rules) -> NamedSharding:
        sharding = named_sharding(of.axes, of.shape, mesh, rules)
        if not self._is_turned(of):
            return sharding
        return NamedSharding(mesh, PartitionSpec(*(_over(sharding.spec, each) for each in self._order(of))))

    def _order(self, of: Dimensions) -> tuple[tuple[int, ...], ...]:
        """Return the dimensions of a turned matrix that each dimension of the kept array holds."""
        return tuple((i,) for i in of.kept) if of.kept else (of.outputs, of.inputs)

    def _is_turned(self, of: Dimensions) -> bool:
        by_outputs = self.by_outputs if of.dtype is None else self._quantized_by_outputs
        return by_outputs and bool(of.inputs) and not of.looked_up and not of.by_outputs


def _placement(of: Dimensions, sharding: NamedSharding) -> NamedSharding | Format:
    """Return where and how a parameter is kept that is not turned; other platforms than TPUs keep all row by row."""
    by_rows = of.looked_up or of.of_experts
    if not by_rows or sharding.mesh.devices.flat[0].platform != "tpu":
        return sharding
    return Format(Layout(tuple(range(len(of.shape)))), sharding)


def _turned(x: jax.Array | np.ndarray, of: Dimensions, sharding: NamedSharding) -> jax.Array:
    """Return a matrix with its axes in the order that it is kept in. A view of NumPy is turned as it is copied."""
    if of.kept:
        own = tuple(size for i, size in enumerate(of.shape) if i in of.kept)
        among = sorted(of.kept)
        turn = _Turn(own, tuple(among.index(i) for i in of.kept))
    else:
        turn = _Turn((math.prod(of.shape[i] for i in of.inputs), -1), (1, 0))
    if isinstance(x, np.ndarray):
        return jax.device_put(turn(x), sharding)
    return _turning(turn, sharding)(x)


@dataclass(frozen=True)
class _Turn:
    """The change of a matrix to a shape, and then to an order of its axes."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    def __call__(self, x: Any) -> Any:
        return x.reshape(self.shape).transpose(self.order)


@lru_cache
def _turning(turn: _Turn, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return the program of a change: one for all layers."""
    return jax.jit(turn, out_shardings=sharding)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _over(spec: PartitionSpec, dimensions: tuple[int, ...]) -> str | tuple[str, ...] | None:
    """Return the mesh axes that shard the first of these dimensions; no rule shards heads or hidden numbers within."""
    first, *others = (spec[i] if i < len(spec) else None for i in dimensions)
    assert not any(others), spec
    return first
