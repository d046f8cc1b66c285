"""The choice of an implementation: the one that a call names, or else the first that supports the call."""

from collections.abc import Callable, Collection, Mapping

import jax
from jax.sharding import AxisType

from kernels_pallas.core import interpretation, target
from kernels_pallas.core.target import TargetChip

# Lowered by Pallas, each for its own chips; XLA compiles the other implementations for any chip.
KERNELS = ("triton", "mosaic_gpu", "mosaic_tpu")


def choose(
    operation: str,
    implementation: str | None,
    reasons: Mapping[str, Callable[[TargetChip | None], str | None]],
    manual: bool = False,
    by_name: Collection[str] = (),
) -> str:
    """Return the name of the implementation to run: "reference" or a key of `reasons`.

    Args:
      operation: its name, for the message.
      implementation: the one that the caller or else a surrounding `interpreted` requests; None takes the first of
        `reasons` that supports the call on the target being lowered for, and otherwise the reference. "xla" is the
        reference where `reasons` has no "xla": there is nothing to tune.
      reasons: for each implementation besides the reference, in order of preference, a function of the target that
        returns None where it supports this call, and otherwise the reason in a few words; that of "xla" gets None.
      manual: whether the operation puts the call inside a shard_map of its own.
      by_name: implementations in `reasons` that None does not take.

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
            general = None
        return general or reasons[name](chip)

    if implementation is not None:
        if reason := unsupported_reason(implementation):
            raise NotImplementedError(f"{operation}: {implementation} cannot serve this call: {reason}")
        return implementation
    return next((name for name in reasons if name not in by_name and unsupported_reason(name) is None), "reference")


def cannot_lower(implementation: str, chip: TargetChip) -> str | None:
    """Return why one of KERNELS does not run on a chip, or None where it does."""
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
