"""Quantised matrices that are made of published ones without rounding a number."""

import math

import numpy as np
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Tree
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
        return KeptMatrix(path, self._form, of.inputs[0], [of.shape[i] for i in of.inputs], shards)


class KeptMatrix:
    """Values and scales of a matrix [stack…, *inputs, *outputs], as `QuantizedMatrix` has them, filled part by part."""

    def __init__(self, path: str, form: Quantization, stacked: int, inputs: list[int], shards: dict[str, HostShards]):
        self._path, self._form, self._stacked, self._inputs, self._shards = path, form, stacked, inputs, shards

    def fill(self, begin: tuple[int, ...], numbers: np.ndarray, scales: np.ndarray) -> None:
        """Take the numbers and scales of a part [1…, *inputs, *outputs], which has all inputs and begins at `begin`.
        Raises InputError where inputs of a group have different scales."""
        stack, size = (1,) * self._stacked, math.prod(self._inputs)
        outputs = numbers.shape[self._stacked + len(self._inputs) :]
        group = self._form.group_of(size)
        assert group is not None
        grouped = scales.reshape(size // group, group, *outputs)
        bits = grouped.view(f"u{grouped.itemsize}")  # equal of NaN too
        if np.any(bits != bits[:, :1]):
            raise InputError(
                f"{self._path}: the stored scales are not those of {group} inputs beside one another; set "
                "execution.quantize=none, which reads the matrix in full"
            )
        values = numbers.reshape(size, *outputs)
        if self._form.kind == "int4":
            values = _packed(values, group)
        for name, part in zip(_PARTS, (values, grouped[:, 0]), strict=True):
            at = (*begin[: self._stacked], *(0 for _ in outputs), begin[-1])
            self._shards[name].fill(at, part.reshape(*stack, *part.shape))

    def on_devices(self) -> Tree:
        """Return values and scales, once all of them have been filled."""
        return {name: shards.on_devices() for name, shards in self._shards.items()}


def _packed(numbers: np.ndarray, group: int) -> np.ndarray:
    """Return int8 numbers of four bits [K, …] as bytes [K/2, …]: the first half of each group is in the low nibbles."""
    codes = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 2, group // 2, *numbers.shape[1:])
    return ((codes[:, 0] & 15) | (codes[:, 1] << 4)).reshape(-1, *numbers.shape[1:])
