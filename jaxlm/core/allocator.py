"""The allocator of host memory, glibc's malloc, set for programs that allocate the same at each call."""

import ctypes
import platform

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. XLA's CPU programs allocate all temporaries anew at each call; returning them to
    the system and clearing them again page by page takes about a third of a small step (`benchmarks/README.md`).

    Call it before JAX starts: a thread of XLA that has a heap of its own by then keeps that heap, which is too small.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, 0)  # no block has a mapping of its own, which freeing would unmap
    mallopt(_M_TRIM_THRESHOLD, -1)  # the end of the heap is never returned
    mallopt(_M_ARENA_MAX, 1)  # one heap, so that every thread can reuse what another freed
    mallopt(_M_TOP_PAD, 2**26)  # the heap grows by 64 MiB
