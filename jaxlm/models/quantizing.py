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
        self._is_tied = model.tied_embeddings and quantization.of_unembedding
        self._structure = jax.tree.structure(model_tree.shardings(tree, mesh, rules))
        self._dimensions = model_tree.paths(model_tree.dimensions(plain))
        self._shardings = model_tree.paths(model_tree.shardings(tree, mesh, rules))
        self._like = model_tree.paths(model_tree.shapes(plain, dtype)) if dtype is not None else {}

    def reads(self, path: str) -> bool:
        """Return whether the numbers of the parameter at a path of the model are quantised."""
        return path not in self._shardings or self._is_tied_embedding(path)

    def parts(self, path: str, x: jax.Array) -> dict[str, jax.Array]:
        """Return what takes the place of the parameter at a path, by path: values and scales of a matrix, which is then
        deleted, or the parameter itself, beside an embedding those of the unembedding that is tied to it."""
        if path not in self._shardings:
            parts = self._rounded(path, path, x)
            x.delete()
            return parts
        parts = self._rounded("unembedding", path, x) if self._is_tied_embedding(path) else {}
        return parts | {path: x.astype(self._like[path].dtype) if self._like else x}

    def joined(self, parts: dict[str, jax.Array]) -> Tree:
        """Return all parts as the parameters of the model."""
        return jax.tree.unflatten(self._structure, [parts[path] for path in self._shardings])

    def tree(self, parameters: Tree) -> Tree:
        """Return all parameters; those whose place others take are taken out of the given tree and deleted."""
        return self.joined(self._parts_below(parameters, ""))

    def _parts_below(self, parameters: Tree, above: str) -> dict[str, jax.Array]:
        parts: dict[str, jax.Array] = {}
        for name in sorted(parameters):
            path, below = f"{above}{name}", parameters.pop(name)
            parts |= self._parts_below(below, f"{path}/") if isinstance(below, dict) else self.parts(path, below)
            del below
        return parts

    def _is_tied_embedding(self, path: str) -> bool:
        return self._is_tied and path == "embedding"

    def _rounded(self, to: str, path: str, x: jax.Array) -> dict[str, jax.Array]:
        """Return the values and scales at the path `to`, of the parameter at another or the same."""
        of, paths = self._dimensions[path], (f"{to}/values", f"{to}/scales")
        is_turned = to != path  # an embedding [V, D]
        axes = of.axes[::-1] if is_turned else of.axes
        inputs = axes[:1] if is_turned else tuple(of.axes[i] for i in of.inputs)
        shardings = tuple(self._shardings[each] for each in paths)
        parts = _program(axes, inputs, self._quantization, shardings, is_turned)(x)
        return dict(zip(paths, jax.block_until_ready(parts), strict=True))


@lru_cache
def _program(
    axes: tuple[str, ...],
    inputs: tuple[str, ...],
    quantization: Quantization,
    shardings: tuple[NamedSharding, ...],
    is_turned: bool,
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return a program that quantises a matrix, or one that is turned: one for all of one form."""
    return jax.jit(lambda x: quantized(x.T if is_turned else x, axes, inputs, quantization), out_shardings=shardings)
