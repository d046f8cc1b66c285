"""Devices of chips that are not present, as compilation targets for XLA's compilers."""

import importlib.util
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxlm.core import accelerators
from jaxlm.core.errors import InputError
from jaxlm.core.extras import install
from jaxlm.costs.hardware.catalog import catalog
from jaxlm.costs.hardware.chips import Chip, show_topology
from jaxlm.costs.hardware.target import Target

if TYPE_CHECKING:
    import jax


# Threads and float32 units per SM, by compute capability (CUDA C++ Programming Guide, tables of compute capabilities).
_THREADS = {"8.0": 2048, "8.6": 1536, "8.9": 1536, "9.0": 2048, "10.0": 2048, "10.3": 2048, "12.0": 1536}
_FLOAT32_UNITS = {"8.0": 64}
_RESERVED = 1024  # bytes of each SM's shared memory that CUDA keeps per block

# Without these, libtpu queries the machine for a TPU and reports an error if there is none.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
}


def can_be_compiled_for(chip: Chip) -> bool:
    """Return whether XLA can compile for this chip: it has a compiler and the figures that the compiler needs."""
    return chip.kind == "cpu" or chip.libtpu_name is not None or not _unknown(chip)


def devices(target: Target) -> list["jax.Device"]:
    """Return the devices of these chips: compile-only, or this machine's CPU devices for "host".

    Disables JAX's compilation cache (`JAX_COMPILATION_CACHE_DIR`) for the rest of the process, since JAX writes
    programs for absent chips to it and cannot read them back.

    Raises InputError for chips without a compiler, and if the compiler is not installed.
    """
    import jax
    from jax.experimental import topologies
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the setting is read once, perhaps already
    chip = target.chip
    if chip.kind == "cpu":
        return jax.devices("cpu")[: target.devices]
    if chip.libtpu_name:
        _require("libtpu", "libtpu")
        return _described(target, topologies.get_topology_desc, "tpu", **_tpu(target))
    if missing := _unknown(chip):
        known = ", ".join(id for id, other in catalog().items() if can_be_compiled_for(other))
        raise InputError(f"no compiler for {chip.id} ({missing}); there is one for {known}")
    _require("jax_plugins.xla_cuda13", "jax-cuda13-plugin")
    return _described(target, topologies.get_topology_desc, "cuda", **_cuda(target))


def _described(target: Target, describe: Callable, platform: str, **arguments: Any) -> list["jax.Device"]:
    import jax

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # otherwise processes wait for a common lock, and abort
    if not accelerators.found():
        for name, value in _NO_MACHINE.items():
            os.environ.setdefault(name, value)
    try:
        target_devices = describe(platform=platform, **arguments).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"the compiler rejects {target}: {str(error).splitlines()[0]}") from None
    if len(target_devices) != target.devices:
        raise InputError(f"the compiler makes {len(target_devices)} devices of {target}, which has {target.devices}")
    return target_devices


def _tpu(target: Target) -> dict[str, Any]:
    """Return the topology of slices of a TPU: both cores of a v4 are one device, and a single chip has its own host."""
    megacore = {"chip_config_name": "megacore"} if target.chip.libtpu_name == "v4" else {}
    alone = {"chips_per_host_bounds": [1, 1, 1]} if math.prod(target.topology) == 1 else {}
    slices = {"num_slices": target.slices} if target.slices > 1 else {}
    return {
        "topology_name": f"{target.chip.libtpu_name}:{show_topology(target.topology)}",
        **slices,
        **megacore,
        **alone,
    }


def _cuda(target: Target) -> dict[str, str]:
    """Return the topology of GPU nodes, with the chip as XLA's `GpuTargetConfigProto`."""
    nodes, gpus = target.topology
    return {"topology": f"1x{nodes}x{gpus}", "target_config": gpu_target(target.chip)}


def gpu_target(chip: Chip) -> str:
    """Return the text of the `GpuTargetConfigProto` that describes a GPU to XLA's CUDA compiler."""
    major, minor = chip.compute_capability.split(".")
    accelerated = int(major) >= 9  # instructions specific to the generation, such as wgmma
    on_chip = chip.on_chip
    return f"""
gpu_device_info {{
  name: "{chip.device_kinds[0]}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {chip.compute_capability}{"a" * accelerated}"
  cuda_compute_capability {{
    major: {major} minor: {minor} {"feature_extension: ACCELERATED_FEATURES" * accelerated}
  }}
  core_count: {on_chip.cores}
  fpus_per_core: {_FLOAT32_UNITS.get(chip.compute_capability, 128)}
  clock_rate_ghz: {on_chip.clock_hz / 1e9:g}
  device_memory_size: {chip.device_memory_bytes}
  memory_bandwidth: {chip.memory_bytes_per_s:.0f}
  l2_cache_size: {on_chip.l2_bytes}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {on_chip.block_scratchpad_bytes}
  shared_memory_per_core: {on_chip.block_scratchpad_bytes + _RESERVED}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {_THREADS[chip.compute_capability]}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.device_kinds[0]}"
"""


def _unknown(chip: Chip) -> str:
    """Return why the CUDA compiler does not support a chip; "" if it does."""
    if chip.compute_capability is None:
        return "XLA compiles for NVIDIA's GPUs and for TPUs"
    needed = ("on_chip.cores", "on_chip.clock_hz", "on_chip.block_scratchpad_bytes", "on_chip.l2_bytes")
    figures = chip.figures()
    missing = [name for name in (*needed, "device_memory_bytes") if name not in figures]
    return f"its {', '.join(missing)} are not in the catalog" if missing else ""


def _require(module: str, name: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent package is missing too
        found = None
    if found is None:
        raise InputError(f"{name} is not installed: {install('compile')}")
