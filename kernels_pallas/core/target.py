"""The chip that is being lowered for, also when it is absent."""

import dataclasses
import functools
import re
from typing import Any, Literal

import jax

# Compute capability by name (NVIDIA's list of CUDA GPUs): ahead of time only the name of a device is known.
_CAPABILITIES = (
    (r"\b(B300|GB300)\b", (10, 3)),
    (r"\b(B200|GB200)\b", (10, 0)),
    (r"\b(RTX PRO \d000|RTX 50\d0)\b", (12, 0)),
    (r"\b(H100|H200|H20|H800|GH200)\b", (9, 0)),
    (r"\b(L4|L40|L40S|RTX 40\d0|RTX 6000 Ada Generation)\b", (8, 9)),
    (r"\b(A10|A10G|A16|A40|RTX 30\d0|RTX A\d000)\b", (8, 6)),
    (r"\b(A100|A30|A800)\b", (8, 0)),
    (r"\bT4\b", (7, 5)),
    (r"\bV100\b", (7, 0)),
)

# Bytes of shared memory that one block may use (CUDA C++ Programming Guide, table of compute capabilities).
_SHARED_MEMORY = {(8, 0): 166_912, (9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448}
_LEAST_SHARED_MEMORY = 101_376

_GENERATIONS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v4 lite": "v4i",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "TPU7": "v7x",
}
# Devices whose kernels all others of their platform have too.
_LEAST = {"gpu": "NVIDIA A100-SXM4-80GB", "tpu": "TPU v5"}
# MiB of VMEM per core, from `jax.experimental.pallas.tpu.get_tpu_info`.
_VMEM = {"v5e": 128, "v5p": 64, "v6e": 128, "v7x": 64}
_LEAST_VMEM = 16


@dataclasses.dataclass(frozen=True)
class TargetChip:
    """A chip's properties that implementations need.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: JAX's `device_kind`, such as "NVIDIA H200" or "TPU v5 lite".
      cores: SMs of a GPU, TensorCores of a TPU device; 1 where JAX does not report it.
      compute_capability: of an NVIDIA GPU, such as (9, 0); None where it is not known.
      generation: of a TPU, such as "v5e"; None where it is not known.
      scratchpad: bytes of fast memory under a program's control: shared memory of one block on a GPU, VMEM on a TPU; 0
        on a CPU.
    """

    platform: Literal["cpu", "gpu", "tpu"]
    kind: str
    cores: int = 1
    compute_capability: tuple[int, int] | None = None
    generation: str | None = None
    scratchpad: int = 0


def current() -> TargetChip:
    """Return the target of the code being traced: the mesh's (also an abstract one's), else JAX's default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return of_kind(device.platform, device.device_kind, device.num_cores)
    return of_device(_default_device())


def platform() -> str | None:
    """Return "cpu", "gpu" or "tpu": that of the mesh in context, also of an abstract one. None without a mesh, where a
    program may be compiled for any chip: no backend is asked.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else of_kind(device.platform, device.device_kind, device.num_cores).platform


def of_device(device: Any) -> TargetChip:
    """Return the target for a device."""
    known = of_kind(device.platform, device.device_kind, getattr(device, "core_count", None))
    capability = getattr(device, "compute_capability", None)
    if known.platform != "gpu" or known.compute_capability or not re.fullmatch(r"\d+\.\d+", str(capability)):
        return known
    return _gpu(known.kind, known.cores, tuple(map(int, str(capability).split("."))))


@functools.cache
def of_kind(platform: str, kind: str, cores: int | None = None) -> TargetChip:
    """Return the target with these names in JAX."""
    if platform == "tpu":
        generation = _GENERATIONS.get(kind)
        return TargetChip("tpu", kind, cores or 1, None, generation, _VMEM.get(generation, _LEAST_VMEM) * 2**20)
    if platform in ("gpu", "cuda", "rocm"):
        named = (capability for name, capability in _CAPABILITIES if re.search(name, kind))
        return _gpu(kind, cores or 1, next(named, None))
    return TargetChip("cpu", kind, cores or 1)


def any_of(platform: str) -> TargetChip:
    """Return a target that stands for all of a platform, "gpu" or "tpu": the others have its kernels too."""
    return of_kind(platform, _LEAST[platform])


def _gpu(kind: str, cores: int, capability: tuple[int, int] | None) -> TargetChip:
    return TargetChip("gpu", kind, cores, capability, None, _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY))


def _default_device() -> Any:
    chosen = jax.config.jax_default_device
    if chosen is None:
        return jax.devices()[0]
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen
