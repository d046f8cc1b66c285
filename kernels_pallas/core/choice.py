"""The choice of an implementation: the one that a call names, or else the fastest measured one that supports the call,
or without measurements the first.
"""

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from kernels_pallas.core import interpretation, launch, measured, target
from kernels_pallas.core.measured import CallClass, Direction, MeasuredRow
from kernels_pallas.core.target import TargetChip

# Lowered by Pallas, each for its own chips; XLA compiles the other implementations for any chip.
KERNELS = ("triton", "mosaic_gpu", "mosaic_tpu")

_NO_TRITON = f"JAX {jax.__version__} does not lower Pallas to Triton"

# The choices that are made inside a surrounding `explain`. A user context: what was traced outside is traced again.
_explained = jax.make_user_context(None)


class _Explanations:
    """Lines about choices, one for each that differs."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}


def explain(function: Callable, *arguments: Any, **options: Any) -> tuple[str, ...]:
    """Return a line for each choice of an implementation in function(*arguments, **options): what runs, and why.

    explain(flash_attention, query, key, value, key_range=causal(8192)) names the row of the table that chose. Nothing
    is computed: arrays may be `jax.ShapeDtypeStruct`. The chip is that of the mesh in context, also of an abstract one
    (`jax.sharding.use_abstract_mesh`), or else JAX's default device.
    """
    shaped = {name: x for name, x in options.items() if isinstance(x, jax.Array | jax.ShapeDtypeStruct)}
    fixed = {name: x for name, x in options.items() if name not in shaped}
    explanations = _Explanations()
    with _explained(explanations):
        jax.eval_shape(functools.partial(function, **fixed), *arguments, **shaped)
    return tuple(explanations.lines)


def choose(
    operation: str,
    implementation: str | None,
    reasons: Mapping[str, Callable[[TargetChip | None], str | None]],
    manual: bool = False,
    by_name: Collection[str] = (),
    call: CallClass | None = None,
    direction: Direction = "training",
) -> str:
    """Return the name of the implementation to run: "reference" or a key of `reasons`.

    Args:
      operation: its name, for the message and the table of measured implementations.
      implementation: the one that the caller or else a surrounding `interpreted` requests; None takes, of the nearest
        row of the table, the fastest that supports the call on the target being lowered for. Without a row it is the
        first such of `reasons`, and without any the reference. "xla" is the reference where `reasons` has no "xla":
        there is nothing to tune.
      reasons: for each implementation besides the reference, in order of preference, a function of the target that
        returns None where it supports this call, and otherwise the reason in a few words; that of "xla" gets None.
      manual: whether the operation puts the call inside a shard_map of its own.
      by_name: implementations in `reasons` that None takes only where a row of the table has them, or where JAX no
        longer lowers Pallas to Triton.
      call: the class of the call, by which rows are found; None finds none.
      direction: "training" where the call may be differentiated.

    Raises ValueError for an unknown name, NotImplementedError for an implementation that cannot serve.
    """
    implementation = interpretation.requested(implementation)
    if implementation == "reference" or (implementation == "xla" and "xla" not in reasons):
        return "reference"
    if implementation is not None and (not isinstance(implementation, str) or implementation not in reasons):
        names = ", ".join(dict.fromkeys(["reference", "xla", *reasons]))
        raise ValueError(f"{operation}: there is no implementation {implementation!r}; there are {names}")

    def unsupported_reason(name: str) -> str | None:
        if name == "xla":  # it serves any chip, and to ask for the chip may start a backend
            return reasons[name](None)
        chip = target.current()
        if name in KERNELS and not interpretation.current():  # any platform interprets
            general = cannot_lower(name, chip) or (None if manual else _is_partitioned(name))
        else:
            general = _NO_TRITON if name == "triton" and not launch.has_triton() else None
        return general or reasons[name](chip)

    if implementation is not None:
        if reason := unsupported_reason(implementation):
            raise NotImplementedError(f"{operation}: {implementation} cannot serve this call: {reason}")
        return implementation
    chip = target.current() if reasons.keys() - {"xla"} else None
    pick = fastest(operation, unsupported_reason, reasons, chip, by_name, call, direction)
    if (explanations := _explained.value) is not None:
        explanations.lines[pick.explanation(operation, chip, call, direction)] = None
    if "triton" in reasons and not launch.has_triton() and pick.name not in KERNELS:
        if chip is not None and (chip.compute_capability or (0, 0)) >= (8, 0):
            _say(f"{operation}: {_NO_TRITON}, and no other of our kernels serves a call on {chip.kind}")
    return pick.name


@functools.cache
def _say(line: str) -> None:
    """Warn, once for each line."""
    warnings.warn(line, RuntimeWarning, stacklevel=3)


class Pick(NamedTuple):
    """The implementation of a call that names none, the row of the table that chose it, and why others, which are
    faster or preferred, are refused.
    """

    name: str
    row: MeasuredRow | None
    refused: dict[str, str]

    def explanation(self, operation: str, chip: TargetChip | None, call: CallClass | None, direction: Direction) -> str:
        """Return the choice and its reason in a line."""
        without = "".join(f"; not {other}: {reason}" for other, reason in self.refused.items())
        chosen, here = f"{operation}, {direction}: {self.name}", chip.kind if chip else "any chip"
        if self.row is None:
            return (
                f"{chosen}, the first that supports the call, as no measured row is of such a call on {here}{without}"
            )
        is_timed = self.name in self.row.milliseconds
        reason = "the fastest that supports the call in" if is_timed else "the first that supports it, as none does in"
        which = "the row" if call == self.row.call else f"the row nearest to {call}"
        borrowed = "" if here == self.row.chip else f"; {here} has no rows, and the same compute capability"
        return f"{chosen}, {reason} {which}: {self.row}{borrowed}{without}"


def fastest(
    operation: str,
    unsupported_reason: Callable[[str], str | None],
    names: Collection[str],
    chip: TargetChip | None,
    by_name: Collection[str] = (),
    call: CallClass | None = None,
    direction: Direction = "training",
) -> Pick:
    """Return what None takes on a chip of the implementations `names`, in order of preference; see `choose`."""
    by_name = by_name if launch.has_triton() else ()
    row = None if call is None or chip is None else measured.nearest(operation, call, direction, chip)
    refused: dict[str, str] = {}
    for name in _in_order(row, names, by_name):
        if name == "reference" or (reason := unsupported_reason(name)) is None:
            return Pick(name, row, refused)
        refused[name] = reason
    return Pick("reference", row, refused)


def _in_order(row: MeasuredRow | None, names: Collection[str], by_name: Collection[str]) -> list[str]:
    """Return the implementations that None may take: those of a row, the fastest first, then others by preference."""
    # Where an operation has an "xla", its reference is the specification, which may be slow or hold more.
    known = {*names, *(() if "xla" in names else ("reference",))}
    timed = [name for name in row.milliseconds if name in known] if row else []
    return [*timed, *(name for name in names if name not in (*timed, *by_name))]


def cannot_lower(implementation: str, chip: TargetChip) -> str | None:
    """Return why one of KERNELS does not run on a chip, or None where it does."""
    if implementation == "triton" and not launch.has_triton():
        return _NO_TRITON
    capability = chip.compute_capability or (0, 0)
    lowered, runs_on = {
        "mosaic_tpu": (chip.platform == "tpu" and chip.generation not in (None, "v2", "v3"), "TPU v4 and later"),
        "mosaic_gpu": (capability == (9, 0), "NVIDIA GPUs of compute capability 9.0, Hopper"),
        "triton": (capability >= (8, 0), "NVIDIA GPUs from Ampere on"),
    }[implementation]
    return None if lowered else f"it runs on {runs_on}, and this is lowered for {chip.kind} ({chip.platform})"


def _is_partitioned(implementation: str) -> str | None:
    """Return why XLA's partitioner, which cannot look into a kernel, would gather its operands or refuse it."""
    mesh = jax.sharding.get_abstract_mesh()
    left = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    sharded = [name for name in mesh.axis_names if name in left and mesh.shape[name] > 1]
    if not sharded and implementation == "mosaic_tpu" and len(left) < len(mesh.axis_names):
        sharded = sorted(left)  # where some axes are manual Mosaic requires all to be, even axes of one device
    return f"call it inside jax.shard_map over the mesh axes {', '.join(map(str, sharded))}" if sharded else None
