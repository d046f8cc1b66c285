"""Arrays that are filled on the host before they go to devices."""

import math

import jax
import numpy as np

# A CPU device takes a buffer that begins at a multiple of so many bytes as it is; another it would copy.
_ALIGNMENT = 64
# Numbers that are copied at a time: they and their copy stay in a core's second cache.
_CACHE_BYTES = 2**17


class HostShards:
    """The shards of one array that this process's devices hold, filled piece by piece.

    Devices that hold the same shard are filled from one buffer. On a CPU the buffers become the array without a copy.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding):
        """Make room, which takes memory as it is filled."""
        self._shape, self._sharding = shape, sharding
        self._bounds = {
            device: tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
            for device, index in sharding.addressable_devices_indices_map(shape).items()
        }
        self._buffers = {bounds: _empty(bounds, dtype) for bounds in self._bounds.values()}

    def fill(self, begin: tuple[int, ...], piece: np.ndarray) -> None:
        """Copy a piece of the array, which has its first number at `begin`, into the shards that it is in, rounded to
        their dtype. Of a piece that lies in a file, no other part is read."""
        end = [start + size for start, size in zip(begin, piece.shape, strict=True)]
        for bounds, buffer in self._buffers.items():
            if any(low >= last or high <= first for (low, high), first, last in zip(bounds, begin, end, strict=True)):
                continue
            to, of = [], []
            for (low, high), start, stop in zip(bounds, begin, end, strict=True):
                first, last = low if low > start else start, high if high < stop else stop
                to.append(slice(first - low, last - low))
                of.append(slice(first - start, last - start))
            _copy(buffer[*to, ...], piece[*of, ...])  # views, also of arrays without dimensions

    def on_devices(self) -> jax.Array:
        """Return the array, once all of it has been filled and is on its devices. The shards are not filled again."""
        shards = [jax.device_put(self._buffers[bounds], device) for device, bounds in self._bounds.items()]
        return jax.block_until_ready(jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards))


def _copy(to: np.ndarray, of: np.ndarray) -> None:
    """Copy numbers into an array of the same shape, in the order in which they lie, as many rows at a time as the cache
    has room for: transposing whole matrices would miss it at each number."""
    if of.nbytes <= _CACHE_BYTES:
        to[...] = of.astype(to.dtype)
        return
    axis = max(range(of.ndim), key=lambda i: of.strides[i])
    rows = max(1, _CACHE_BYTES * of.shape[axis] // max(of.nbytes, 1))
    for first in range(0, of.shape[axis], rows):
        part = (*(slice(None),) * axis, slice(first, first + rows))
        to[part] = of[part].astype(to.dtype)


def _empty(bounds: tuple[tuple[int, int], ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array of a shard's shape that a CPU device takes without a copy."""
    shape = [high - low for low, high in bounds]
    size = dtype.itemsize * math.prod(shape)
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)
