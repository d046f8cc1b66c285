"""Reversible rearrangements of one stored tensor into arrays of the tree, and back."""

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from einops import rearrange

# Axes of constant size, which a pattern may name: the two numbers of a rotated pair.
_CONSTANTS = {"two": 2}
_FUSED = re.compile(r"\(([^()]*\|[^()]*)\)|\(((?:[^()]|\([^()]*\))*\|(?:[^()]|\([^()]*\))*)\)")


class Pattern:
    """An einops pattern with one more sign: `|` between parts that a stored tensor holds one after another.

    `"(n h | k h | k h) d -> d n h ; d k h ; d k h"` reads the fused projection of Phi-3 into queries, keys and values,
    and writes queries, keys and values back. Part i goes to output i. At most one axis, at any depth, has parts.
    `"(n (r two)) d -> d n (two r)"` reads interleaved rotary pairs as halves. Only indices move: both directions are
    exact.

    `sizes`: those of axes that the shapes of the outputs leave open.
    """

    def __init__(self, text: str, sizes: Mapping[str, int] = MappingProxyType(_CONSTANTS)):
        left, _, right = text.partition("->")
        self.text, self._known = text, sizes
        self.outputs = [output.strip() for output in right.split(";")]
        self._whole, self._parts = left.strip(), [""]
        if fused := _FUSED.search(left):
            self._parts = [" ".join(_axes(part)) for part in (fused[1] or fused[2]).split("|")]
            self._whole = f"{left[: fused.start()]}fused{left[fused.end() :]}".strip()
        if len(self._parts) != len(self.outputs):
            raise ValueError(f"{text!r} has {len(self._parts)} parts and {len(self.outputs)} outputs")
        self._whole, self._flat = _grouped(self._whole), _axes(self._whole)

    def with_sizes(self, sizes: Mapping[str, int]) -> "Pattern":
        """Return the pattern with the sizes of those of its axes that have one of these names."""
        named = {name: sizes[name] for name in _axes(self.text) if name in sizes}
        return Pattern(self.text, {**self._known, **named}) if named else self

    @property
    def rank(self) -> int:
        """The number of axes of the first output."""
        return len(_groups(self.outputs[0]))

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Return the size of each axis, from the shapes of the outputs. Raises ValueError if the shapes disagree."""
        known = dict(self._known)
        for output, shape in zip(self.outputs, shapes, strict=True):
            groups = _groups(output)
            if len(groups) != len(shape):
                raise ValueError(f"{output!r} names {len(groups)} axes of an array {shape}")
            for group, size in zip(groups, shape, strict=True):
                names = _axes(group)
                unknown = [name for name in names if name not in known]
                rest = math.prod(known[name] for name in names if name in known)
                if len(unknown) > 1 or size % rest or (not unknown and rest != size):
                    raise ValueError(f"{group!r} of {self.text!r} does not go with {size}")
                known |= {name: size // rest for name in unknown}
        return known

    def stored_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the stored tensor for outputs of these shapes."""
        sizes = self.sizes(shapes)
        sizes["fused"] = sum(self._lengths(sizes))
        return tuple(math.prod(_size(name, sizes) for name in _axes(group)) for group in _groups(self._whole))

    def read(self, stored: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Return the outputs of a stored tensor, as views of it where indices allow."""
        sizes = self.sizes(shapes)
        if self._parts == [""]:
            return [_rearranged(stored, self._whole, self.outputs[0], sizes)]
        lengths = self._lengths(sizes)
        flat = _rearranged(stored, self._whole, " ".join(self._flat), sizes | {"fused": sum(lengths)})
        pieces = np.split(flat, np.cumsum(lengths)[:-1], axis=self._flat.index("fused"))
        return [
            _rearranged(piece, self._with(part), output, sizes)
            for piece, part, output in zip(pieces, self._parts, self.outputs, strict=True)
        ]

    def write(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Return the stored tensor of outputs."""
        sizes = self.sizes([output.shape for output in outputs])
        if self._parts == [""]:
            return _rearranged(outputs[0], self.outputs[0], self._whole, sizes)
        pieces = [
            _rearranged(x, output, self._with(part), sizes)
            for x, output, part in zip(outputs, self.outputs, self._parts, strict=True)
        ]
        sizes["fused"] = sum(self._lengths(sizes))
        flat = np.concatenate(pieces, axis=self._flat.index("fused"))
        return _rearranged(flat, " ".join(self._flat), self._whole, sizes)

    def _with(self, part: str) -> str:
        """Return the flat stored axes with the axes of one part in place of the fused axis."""
        return " ".join(f"({part})" if name == "fused" else name for name in self._flat)

    def _lengths(self, sizes: Mapping[str, int]) -> list[int]:
        return [math.prod(_size(name, sizes) for name in _axes(part)) for part in self._parts]


def _groups(text: str) -> list[str]:
    """Return the axes of one side of a pattern, each a name or a group in parentheses."""
    return re.findall(r"\([^()]*\)|\w+", text)


def _grouped(text: str) -> str:
    """Return a side of a pattern without parentheses inside others, which say nothing more."""
    side, depth = "", 0
    for character in text:
        depth -= character == ")"
        side += character if depth == 0 or character not in "()" else " "
        depth += character == "("
    return side


def _axes(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _size(name: str, sizes: Mapping[str, int]) -> int:
    return int(name) if name.isdigit() else sizes[name]


def _rearranged(x: np.ndarray, before: str, after: str, sizes: Mapping[str, int]) -> np.ndarray:
    return rearrange(x, f"{before} -> {after}", **{name: sizes[name] for name in _axes(before) if name in sizes})
