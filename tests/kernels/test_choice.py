"""The choice of an implementation by the chip being lowered for, the mesh around it and the shape."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec
from launches import launches

from jaxlm.costs.hardware.catalog import catalog
from kernels_pallas import rms_norm
from kernels_pallas.core import target

H200 = AbstractDevice("NVIDIA H200", 132, "gpu")
V5E = AbstractDevice("TPU v5 lite", 1, "tpu")


def kernels(function, device, devices=1, shape=(16, 256), dtype=jnp.bfloat16):
    """Return the number of kernels that a program on a mesh of such devices runs."""
    mesh = AbstractMesh((devices,), ("data",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return len(list(launches(jax.make_jaxpr(function)(jnp.zeros(shape, dtype)))))


def over_data(function, **more):
    return jax.shard_map(function, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), **more)


@pytest.mark.parametrize("device", [H200, V5E], ids=lambda d: d.platform)
def test_chosen_by_the_chip_that_is_not_here(device):
    assert kernels(rms_norm, device) == 1
    assert kernels(jax.grad(lambda x: rms_norm(x).sum()), device) == 2
    assert kernels(rms_norm, AbstractDevice("cpu", None, "cpu")) == 0


def test_only_inside_shard_map_where_there_are_several_devices():
    assert kernels(rms_norm, H200, devices=4) == 0
    assert kernels(over_data(rms_norm), H200, devices=4) == 1
    with pytest.raises(NotImplementedError, match="call it inside jax.shard_map over the mesh axes data"):
        kernels(lambda x: rms_norm(x, implementation="triton"), H200, devices=4)


def test_mosaic_wants_all_axes_where_some_are_manual():
    mesh = AbstractMesh((4, 1), ("data", "tensor"), (AxisType.Auto,) * 2, abstract_device=V5E)
    over = functools.partial(over_data, axis_names={"data"})
    with jax.sharding.use_abstract_mesh(mesh):
        assert "pallas_call" not in str(jax.make_jaxpr(over(rms_norm))(jnp.zeros((16, 256))))
        with pytest.raises(NotImplementedError, match="call it inside jax.shard_map over the mesh axes tensor"):
            jax.make_jaxpr(over(functools.partial(rms_norm, implementation="mosaic_tpu")))(jnp.zeros((16, 256)))


@pytest.mark.parametrize(
    "device, shape, dtype, reason",
    [
        (AbstractDevice("Tesla V100-SXM2-16GB", 80, "gpu"), (4, 8), jnp.float32, "from Ampere on"),
        (AbstractDevice("AMD Instinct MI300X", 304, "gpu"), (4, 8), jnp.float32, "from Ampere on"),
        (H200, (4, 40_000), jnp.float32, "rows of 40000 numbers are wider than 32768"),
    ],
    ids=["Volta", "AMD", "wide"],
)
def test_where_a_kernel_cannot_serve_the_reference_does(device, shape, dtype, reason):
    assert kernels(rms_norm, device, shape=shape, dtype=dtype) == 0
    with pytest.raises(NotImplementedError, match=reason):
        kernels(lambda x: rms_norm(x, implementation="triton"), device, shape=shape, dtype=dtype)


def test_tpus_have_no_float16():
    assert kernels(rms_norm, V5E, dtype=jnp.float16) == 0


@pytest.mark.parametrize(
    "platform, kind, capability, generation",
    [
        ("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), None),
        ("gpu", "NVIDIA A10G", (8, 6), None),
        ("gpu", "NVIDIA L40S", (8, 9), None),
        ("gpu", "NVIDIA H100 80GB HBM3", (9, 0), None),
        ("gpu", "NVIDIA GB200", (10, 0), None),
        ("tpu", "TPU v5", None, "v5p"),
        ("tpu", "TPU7x", None, "v7x"),
        ("cpu", "cpu", None, None),
    ],
)
def test_targets_by_their_names(platform, kind, capability, generation):
    chip = target.of_kind(platform, kind)
    assert (chip.compute_capability, chip.generation) == (capability, generation)


@pytest.mark.parametrize(
    "chip, kind", [pytest.param(chip, kind, id=kind) for chip in catalog().values() for kind in chip.device_kinds]
)
def test_targets_are_what_the_catalog_of_chips_says(chip, kind):
    known = target.of_kind(chip.kind, kind)
    capability = known.compute_capability and ".".join(map(str, known.compute_capability))
    assert (known.platform, capability) == (chip.kind, chip.compute_capability)
    if chip.on_chip is not None:
        field = "scratchpad_bytes" if chip.kind == "tpu" else "block_scratchpad_bytes"
        assert getattr(chip.on_chip, field) in (known.scratchpad, None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(x=jnp.zeros((2, 4), jnp.int32)), "x is int32; it must be of floating point"),
        (dict(x=jnp.zeros(())), "x is a scalar; it must have a last dimension"),
        (dict(x=jnp.zeros((2, 4)), scale=jnp.ones(5)), r"scale has shape \[5\]; it must be \[4\]"),
        (dict(x=jnp.zeros((2, 4)), residual=jnp.ones(4)), r"residual is float32\[4\]; it must be float32\[2, 4\]"),
        (dict(x=jnp.zeros((2, 4)), epsilon=0.0), "epsilon = 0.0; it must be positive"),
    ],
)
def test_operands_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=f"rms_norm: {message}"):
        rms_norm(**arguments)
