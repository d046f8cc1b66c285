"""Adapters that an engine serves beside its model, side by side in the arrays of each matrix."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.models import tree
from jaxlm.models.adapter_set import AdapterSet
from jaxlm.models.config import ModelConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.rules import Rules


class NamedAdapter(NamedTuple):
    """The adapter of a model under a name, by which requests ask for it.

    Attributes:
      matrices: float32, by the path of the matrix that they adapt: A [layers, *inputs, rank] and B [layers, rank,
        *outputs], with the scale in B. Ranks may differ from matrix to matrix.
    """

    name: str
    matrices: dict[str, tuple[np.ndarray, np.ndarray]]

    @property
    def rank(self) -> int:
        """The greatest rank of its matrices."""
        return max(a.shape[-1] for a, _ in self.matrices.values())


def adapter_set(model: ModelConfig, adapters: Sequence[NamedAdapter]) -> AdapterSet | None:
    """Return the sizes of adapters; None where there are none.

    Raises InputError for two of one name, and for one that is not of this model, or of matrices whose adapters the
    engine does not multiply.
    """
    if not adapters:
        return None
    declared = tree.paths(tree.dimensions(tree.abstract(model)[1]))
    names = [adapter.name for adapter in adapters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two adapters are called {twice[0]}; give each a name of its own")
    for adapter in adapters:
        _check(adapter, declared)
    targets = dict.fromkeys(path for adapter in adapters for path in adapter.matrices)
    return AdapterSet(tuple(adapter.rank for adapter in adapters), tuple(sorted(targets)))


def _check(adapter: NamedAdapter, declared: Mapping[str, Dimensions]) -> None:
    if not adapter.matrices:
        raise InputError(f"adapter {adapter.name}: it adapts no matrix")
    for path, (a, b) in adapter.matrices.items():
        of = declared.get(path)
        if of is None or not of.projection or of.of_mixture:
            raise InputError(f"adapter {adapter.name}: {path} is no matrix of the model that may have an adapter")
        if of.kept:
            raise InputError(
                f"adapter {adapter.name}: {path} is multiplied head by head with latents, and served with no adapter "
                "beside it; serve this model by itself, where its adapters are added to the matrices"
            )
        layers, inputs, outputs = ([of.shape[i] for i in some] for some in (of.stack, of.inputs, of.outputs))
        fits = [*layers, *inputs, a.shape[-1]], [*layers, a.shape[-1], *outputs]
        if ([*a.shape], [*b.shape]) != fits:
            raise InputError(
                f"adapter {adapter.name}: A {[*a.shape]} and B {[*b.shape]} of {path} should be "
                f"{fits[0]} and {fits[1]}; it adapts another model"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise InputError(f"adapter {adapter.name}: numbers of {path} are not finite")


def beside(
    model: ModelConfig,
    parameters: Tree,
    adapters: Sequence[NamedAdapter],
    sizes: AdapterSet | None,
    mesh: Mesh,
    rules: Rules,
    dtype: jax.typing.DTypeLike,
    quantized: Quantization | None = None,
) -> Tree:
    """Return the parameters of a model with adapters of these sizes beside them, in a dtype: those of a matrix side by
    side, with zeros where an adapter has a smaller rank there, or none."""
    if sizes is None:
        return parameters
    declared, _ = tree.trained(tree.abstract(model, sizes, quantized=quantized)[1])
    shapes, first = tree.shapes(declared), np.cumsum([0, *sizes.ranks])

    def joined(path: tuple, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        of, _, factor = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")
        axis = -1 if factor == "a" else 1
        whole = np.zeros(shape.shape, np.float32)
        columns = np.moveaxis(whole, axis, 0)
        for at, adapter in zip(first, adapters, strict=False):
            if of in adapter.matrices:
                own = np.moveaxis(adapter.matrices[of]["ab".index(factor)], axis, 0)
                columns[at : at + len(own)] = own
        return whole.astype(dtype)

    arrays = jax.tree_util.tree_map_with_path(joined, shapes)
    placed = jax.device_put(arrays, tree.shardings(declared, mesh, rules))
    return tree.joined(tree.under_adapters(parameters, sizes.targets), placed)
