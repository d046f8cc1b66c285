"""Quantisation of the parameters of a model, one matrix after the other."""

from collections.abc import Callable
from functools import lru_cache

import jax
from jax.sharding import Mesh, NamedSharding

from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantized_matrix import quantized
from jaxlm.models.tree import Tree
from jaxlm.parallel.rules import Rules


class Quantizer:
    """Makes of the parameters of a model those of one with quantised matrices, on a mesh under these rules.

    Args:
      dtype: of the parameters that are not quantised; None keeps that of each.
    """

    def __init__(
        self,
        model: ModelConfig,
        quantization: Quantization,
        mesh: Mesh,
        rules: Rules,
        dtype: jax.typing.DTypeLike | None,
    ):
        _, plain = model_tree.abstract(model)
        _, tree = model_tree.abstract(model, quantized=quantization)
        self._quantization = quantization
        self._dimensions = model_tree.paths(model_tree.dimensions(plain))
        self._shardings = model_tree.paths(model_tree.shardings(tree, mesh, rules))
        self._like = model_tree.paths(model_tree.shapes(plain, dtype)) if dtype is not None else {}

    def is_quantized(self, path: str) -> bool:
        """Return whether the parameter at a path of the model is a matrix that is quantised."""
        return path not in self._shardings

    def parameter(self, path: str, x: jax.Array) -> jax.Array | Tree:
        """Return the parameter at a path, `{"values", "scales"}` of a matrix that is quantised; x is then deleted."""
        if not self.is_quantized(path):
            return x.astype(self._like[path].dtype) if self._like else x
        of = self._dimensions[path]
        inputs = tuple(of.axes[i] for i in of.inputs)
        names = "values", "scales"
        shardings = tuple(self._shardings[f"{path}/{name}"] for name in names)
        parts = _program(of.axes, inputs, self._quantization, shardings)(x)
        jax.block_until_ready(parts)
        x.delete()
        return dict(zip(names, parts, strict=True))

    def tree(self, parameters: Tree, above: str = "") -> Tree:
        """Return all parameters; those whose place others take are taken out of the given tree and deleted."""
        changed: Tree = {}
        for name in sorted(parameters):
            path, below = f"{above}{name}", parameters.pop(name)
            changed[name] = self.tree(below, f"{path}/") if isinstance(below, dict) else self.parameter(path, below)
            del below
        return changed


@lru_cache
def _program(
    axes: tuple[str, ...], inputs: tuple[str, ...], quantization: Quantization, shardings: tuple[NamedSharding, ...]
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return a program that quantises a matrix: one for all of one form."""
    return jax.jit(lambda x: quantized(x, axes, inputs, quantization), out_shardings=shardings)
