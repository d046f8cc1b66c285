"""Tensor maps: how the copy engine addresses boxes of an array, and where it places them in shared memory."""

from typing import NamedTuple

import numpy as np
from machine_code.memory import AccessError
from machine_code.tensor_cores import swizzled


class TensorMap(NamedTuple):
    """The copy engine's description of an array, the outermost dimension first.

    Attributes:
      array: index of the array among a kernel's operands and then results.
      dtype: of an element.
      shape, strides: in elements.
      box: elements that one copy moves along each dimension.
      swizzle: bytes within which chunks of 16 bytes are permuted in shared memory; 16 where they are not.
    """

    array: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def bytes(self) -> int:
        """Return the bytes that one copy moves."""
        return self.size * int(np.prod(self.box))

    def places(self, first: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the elements of the box that starts at `first`, in order.

        Returns byte offsets in the array, and a mask of the elements inside.
        """
        offsets, inside = np.zeros(1, np.int64), np.ones(1, bool)
        for at, length, stride, box in zip(first, self.shape, self.strides, self.box, strict=True):
            index = at + np.arange(box)
            offsets = (offsets[:, None] + index * stride * self.size).reshape(-1)
            inside = (inside[:, None] & (index >= 0) & (index < length)).reshape(-1)
        return offsets, inside

    def places_in_shared(self, first: int) -> np.ndarray:
        """Return the addresses of a box's elements in shared memory, where it starts at byte `first`."""
        if first % 128:
            raise AccessError(f"the copy engine accesses byte {first} of shared memory, which is not aligned to 128")
        places = first + self.size * np.arange(int(np.prod(self.box)), dtype=np.int64)
        if self.swizzle > 16:
            if self.size * self.box[-1] > self.swizzle:
                raise AccessError(f"rows of {self.size * self.box[-1]} bytes exceed their swizzle of {self.swizzle}")
            places = swizzled(places, self.swizzle)
        return places.astype(np.uint64)
