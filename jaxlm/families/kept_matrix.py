"""Quantised matrices that are made of published ones without rounding a number."""

import math

import numpy as np
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.host_shards import HostShards
from jaxlm.parallel.rules import Rules

_PARTS = ("values", "scales")


class KeptMatrices:
    """The quantised matrices of a model that are made so, on a mesh under these rules."""

    def __init__(self, model: ModelConfig, form: Quantization, mesh: Mesh, rules: Rules):
        _, plain = model_tree.abstract(model)
        _, tree = model_tree.abstract(model, quantized=form)
        self._form, self._dimensions = form, model_tree.paths(model_tree.dimensions(plain))
        self._shapes = model_tree.paths(model_tree.shapes(tree))
        self._shardings = model_tree.paths(model_tree.shardings(tree, mesh, rules))

    def matrix(self, path: str) -> "KeptMatrix":
        """Return a matrix that is to be filled."""
        of = self._dimensions[path]
        parts = {name: (self._shapes[f"{path}/{name}"], self._shardings[f"{path}/{name}"]) for name in _PARTS}
        shards = {name: HostShards(x.shape, np.dtype(x.dtype), sharding) for name, (x, sharding) in parts.items()}
        return KeptMatrix(path, self._form, of, shards)


class KeptMatrix:
    """Values and scales of a matrix, as `QuantizedMatrix` has them, filled part by part."""

    def __init__(self, path: str, form: Quantization, of: Dimensions, shards: dict[str, HostShards]):
        self._path, self._form, self._of, self._shards = path, form, of, shards

    def fill(self, begin: tuple[int, ...], numbers: np.ndarray, scales: np.ndarray) -> None:
        """Take the numbers and scales of a part, which has the axes of the matrix with all inputs, and begins at
        `begin`. Raises InputError where inputs of a group have different scales."""
        of, stacked = self._of, len(self._of.stack)
        order = (*of.stack, *of.inputs, *of.outputs)
        stack, outputs = ([numbers.shape[i] for i in axes] for axes in (of.stack, of.outputs))
        size = math.prod(of.shape[i] for i in of.inputs)
        group = self._form.group_of(size)
        assert group is not None
        grouped = scales.transpose(order).reshape(*stack, size // group, group, *outputs)
        bits = grouped.view(f"u{grouped.itemsize}")  # equal of NaN too
        of_group = np.moveaxis(grouped, stacked + 1, 0)[0]
        if np.any(bits != np.expand_dims(of_group, stacked + 1).view(bits.dtype)):
            raise InputError(
                f"{self._path}: the stored scales are not those of {group} inputs beside one another; set "
                "execution.quantize=none, which reads the matrix in full"
            )
        values = numbers.transpose(order).reshape(*stack, size, *outputs)
        if self._form.kind in ("int4", "mxfp4"):
            values = _packed(values, group, stacked)
        for name, part in zip(_PARTS, (values, of_group), strict=True):
            self._shards[name].fill((*begin[:stacked], *(0 for _ in outputs), begin[-1]), part)

    def on_devices(self) -> Tree:
        """Return values and scales, once all of them have been filled."""
        return {name: shards.on_devices() for name, shards in self._shards.items()}


def _packed(numbers: np.ndarray, group: int, axis: int) -> np.ndarray:
    """Return numbers of four bits as bytes, two in each along an axis: the first half of each group is in the low
    nibbles."""
    stack, rest = numbers.shape[:axis], numbers.shape[axis + 1 :]
    codes = np.ascontiguousarray(numbers).view(np.uint8).reshape(*stack, -1, 2, group // 2, *rest)
    first, second = np.moveaxis(codes, axis + 1, 0)
    return ((first & 15) | (second << 4)).reshape(*stack, -1, *rest)
