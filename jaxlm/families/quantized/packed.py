"""Integers of four or eight bits in words of 32: GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978), read as float32,
which holds each product of a number and its float16 scale exactly, or kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.families.files import CONFIG
from jaxlm.families.quantized.scaled import ScaledTensor, kept_group
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models.quantize_config import Quantization, QuantizeKind

METHODS = ("gptq", "awq")
_WORDS = ".qweight"
_PARTS = (_WORDS, ".qzeros", ".scales", ".g_idx")
_WORD = 32  # bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each number of a word, the lowest bits first
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Packing:
    """The form of the quantized matrices of a directory.

    Attributes:
      method: "gptq" or "awq".
      bits: of a number.
      group: inputs that share a scale and a zero point; 0 is all.
      symmetric: whether the zero point is the middle of the numbers everywhere.
      in_order: whether inputs of a group stand beside one another.
      zero_offset: what is added to stored zero points.
    """

    method: str
    bits: int
    group: int
    symmetric: bool
    in_order: bool
    zero_offset: int

    @classmethod
    def of(cls, described: Mapping[str, Any], where: str) -> "Packing":
        """Read `quantization_config`. Raises InputError for a form that is not read."""
        method, bits = described["quant_method"], described.get("bits")
        group, form = described.get("group_size"), described.get("checkpoint_format") or "gptq"

        def refuse(key: str, value: Any, read: str) -> InputError:
            return InputError(f"{where}: {key} = {value!r} of {method}, and jaxlm reads {read} alone")

        known = (4, 8) if method == "gptq" else (4,)
        if bits not in known:
            raise refuse("bits", bits, " and ".join(map(str, known)))
        if type(group) is not int or group < -1 or group == 0:
            raise refuse("group_size", group, "-1 (all inputs) and numbers of inputs")
        group = max(group, 0)
        if method == "awq":
            if (version := str(described.get("version", "gemm")).lower()) != "gemm":
                raise refuse("version", version, "'gemm'")
            if (zeros := described.get("zero_point", True)) is not True:
                raise refuse("zero_point", zeros, "true")
            return cls(method, bits, group, False, True, 0)
        if form not in ("gptq", "gptq_v2"):
            raise refuse("checkpoint_format", form, "'gptq' and 'gptq_v2'")
        if described.get("is_marlin_format"):
            raise refuse("is_marlin_format", True, "false")
        if others := [key for key in described.get("dynamic") or {} if not key.startswith("-:")]:
            raise refuse("dynamic", others[0], "rules of what is not quantized ('-:…')")
        symmetric = described.get("sym", True)
        if type(symmetric) is not bool:
            raise refuse("sym", symmetric, "true and false")
        in_order = not described.get("desc_act") or group == 0
        return cls(method, bits, group, symmetric, in_order, 1 if form == "gptq" else 0)

    @property
    def quantization(self) -> Quantization | None:
        """The form that holds these matrices without rounding a number; None where there is none."""
        group = kept_group(self.group)
        if group is None or not self.in_order or self.kind is None:
            return None
        return Quantization(self.kind, group)

    @property
    def kind(self) -> QuantizeKind | None:
        """The kind of the numbers without their zero points: four bits have up to 15 of either sign with those."""
        if self.symmetric:
            return "int4" if self.bits == 4 else "int8"
        return "int8" if self.bits == 4 else None


def tensors(stored: Mapping[str, StoredTensor], packing: Packing | None) -> tuple[dict[str, LazyTensor], set[str]]:
    """Return the tensors that are packed, `X.qweight` with its parts as X.weight [outputs, inputs], and the names of
    these parts. Raises InputError for parts that do not suit one another."""
    if packing is None:
        return {}, set()
    modules = [name.removesuffix(_WORDS) for name in stored if name.endswith(_WORDS)]
    parts = {module + part for module in modules for part in _PARTS}
    return {f"{module}.weight": _Matrix.of(module, stored, packing).tensor() for module in modules}, parts


@dataclass(frozen=True)
class _Matrix:
    """A packed matrix: `words` of numbers, zero points and scales, and the group of each input where that is stored."""

    module: str
    packing: Packing
    words: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    groups: StoredTensor | None

    @classmethod
    def of(cls, module: str, stored: Mapping[str, StoredTensor], packing: Packing) -> "_Matrix":
        words = stored[module + _WORDS]
        if lost := [module + part for part in (".qzeros", ".scales") if module + part not in stored]:
            raise InputError(f"{words.file}: {lost[0]} is missing, which {module}{_WORDS} needs")
        _, zeros, scales, groups = (stored.get(module + part) for part in _PARTS)
        assert zeros is not None and scales is not None
        matrix = cls(module, packing, words, zeros, scales, groups)
        matrix._check()
        return matrix

    @property
    def shape(self) -> tuple[int, int]:
        """The inputs and outputs."""
        per_word, (rows, columns) = _WORD // self.packing.bits, self.words.shape
        return (rows, columns * per_word) if self.packing.method == "awq" else (rows * per_word, columns)

    def _check(self) -> None:
        named = dict(zip(_PARTS, (self.words, self.zeros, self.scales, self.groups), strict=True))
        said = ", ".join(f"{part} {x.dtype_name} {list(x.shape)}" for part, x in named.items() if x is not None)
        where = f"{self.words.file}: {self.module} has {said}"
        if self.words.dtype_name != "I32" or len(self.words.shape) != 2 or 0 in self.words.shape:
            raise InputError(f"{where}; {_WORDS} must be I32 of two dimensions")
        inputs, outputs = self.shape
        count = -(-inputs // self.packing.group) if self.packing.group else 1
        shapes = {".qzeros": (count, outputs * self.packing.bits // _WORD), ".scales": (count, outputs)}
        shapes |= {".g_idx": (inputs,)} if self.groups is not None else {}
        if (
            self.zeros.dtype_name != "I32"
            or self.scales.dtype_name not in _FLOATS
            or any(named[part].shape != shape for part, shape in shapes.items())
        ):
            must = ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items())
            raise InputError(
                f"{where}; with {self.packing.bits} bits and {self.packing.group or 'all'} inputs in a group it must "
                f"have {must}, in I32 and scales in floating point"
            )

    def tensor(self) -> LazyTensor:
        """Return the matrix [outputs, inputs]."""
        own = np.dtype(np.float32), self.shape[::-1], self._wide
        if self.packing.kind is None or not self._is_in_order:
            return LazyTensor(*own)
        return ScaledTensor(*own, self.packing.kind, self.packing.group, self._parts)

    @property
    def _is_in_order(self) -> bool:
        inputs, _ = self.shape
        order = np.arange(inputs) // (self.packing.group or inputs)
        return self.groups is None or np.array_equal(self.groups.read(), order)

    def _wide(self) -> np.ndarray:
        numbers = self._numbers().astype(np.float32)
        numbers *= self._per_input(self.scales.read().astype(np.float32))
        return numbers.T

    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers and scales, as `ScaledTensor` has them."""
        numbers = self._numbers()
        most = 8 if self.packing.kind == "int4" else 128
        if numbers.min() < -most or numbers.max() >= most:
            raise InputError(
                f"{self.words.file}: zero points of {self.module} are not the middle of {self.packing.bits} bits, and "
                f'"sym" says so: set it to false in {CONFIG}'
            )
        return numbers.astype(np.int8).T, self._per_input(self.scales.read()).T

    def _numbers(self) -> np.ndarray:
        """Return the numbers [inputs, outputs] without their zero points, int16."""
        packing = self.packing
        order = _AWQ_ORDER if packing.method == "awq" else range(_WORD // packing.bits)
        axis = 1 if packing.method == "awq" else 0
        codes = unpacked(self.words.read(), packing.bits, axis, order).astype(np.int16)
        zeros = unpacked(self.zeros.read(), packing.bits, 1, order)
        # A stored zero point is one less in the first format of GPTQ, within the bits of a number.
        zeros = (zeros + np.uint8(packing.zero_offset)) & np.uint8(2**packing.bits - 1)
        codes -= self._per_input(zeros)
        return codes

    def _per_input(self, by_group: np.ndarray) -> np.ndarray:
        """Return rows [inputs, outputs] of those of groups."""
        inputs, _ = self.shape
        if self.groups is None:
            return np.repeat(by_group, self.packing.group or inputs, axis=0)[:inputs]
        groups = self.groups.read()
        if groups.min() < 0 or groups.max() >= len(by_group):
            raise InputError(
                f"{self.groups.file}: {self.module}.g_idx names groups {groups.min()} to {groups.max()} of "
                f"{len(by_group)}"
            )
        return by_group[groups]


def unpacked(words: np.ndarray, bits: int, axis: int, order: "range | tuple[int, ...]") -> np.ndarray:
    """Return the numbers of int32 words [R, C] in uint8, those of a word along an axis; `order` has the place of each,
    the lowest bits first."""
    R, C = words.shape
    unsigned, mask = words.view(np.uint32), 2**bits - 1
    numbers = np.empty((R, C, len(order)) if axis else (R, len(order), C), np.uint8)
    for i, place in enumerate(order):
        part = (unsigned >> np.uint32(bits * i)) & np.uint32(mask)
        numbers[(slice(None),) * (1 + axis) + (place,)] = part
    return numbers.reshape((R, -1) if axis else (-1, C))
