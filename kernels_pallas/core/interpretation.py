"""The context in which kernels run in Pallas's interpreter, on a machine without their chip."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


class Interpretation(NamedTuple):
    """The state of a surrounding `interpreted`.

    Attributes:
      implementation: the one for calls that name none; None lets them choose.
      emulator: options of the emulators of Mosaic's memory, as items.
    """

    implementation: str | None
    emulator: tuple[tuple[str, Any], ...]


# A user context, not a plain variable: it is part of JAX's cache keys, so that programs traced outside are not reused.
_current = jax.make_user_context(None)


@contextlib.contextmanager
def interpreted(implementation: str | None = None, **emulator: Any) -> Iterator[None]:
    """Run the kernels that are traced inside in Pallas's interpreter: as plain JAX, on any platform.

    Models whose kernels are "auto" use kernels inside, also on a CPU.

    Args:
      implementation: the one for calls that name none; None lets them choose.
      emulator: options of Pallas's emulators of TPU and Hopper memory, such as `detect_races` (`pltpu.InterpretParams`,
        `InterpretGPUParams`). Without any, TPU kernels run without emulated memory; Triton's have no emulator.
    """
    with _current(Interpretation(implementation, tuple(sorted(emulator.items())))):
        yield


def current() -> Interpretation | None:
    """Return the state of the surrounding `interpreted`, or None outside of one."""
    return _current.value


def requested(implementation: str | None) -> str | None:
    """Return the implementation that a call names, or else the one of the surrounding `interpreted`."""
    mode = current()
    return mode.implementation if implementation is None and mode else implementation
