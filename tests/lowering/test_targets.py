"""Absent chips as compilation targets of XLA."""

import os
import platform
import subprocess
import sys

import pytest

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.catalog import catalog, find
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)

GPUS = (
    *("a100-sxm4-80g", "a100-sxm4-40g", "h100-sxm5", "h100-pcie", "h200-sxm", "b200-hgx", "gb200-nvl72"),
    *("gb300-nvl72", "l40s", "rtx4090", "rtx-a6000", "rtx-pro-6000"),
)
TPUS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x")


def test_these_chips_can_be_compiled_for():
    assert {id for id, chip in catalog().items() if targets.can_be_compiled_for(chip)} == {*GPUS, *TPUS}


@pytest.mark.parametrize("id", TPUS)
def test_every_slice_of_a_tpu_is_there(id):
    slices = find(id).legal_slices()
    for slice in [s for s in slices if max(s) <= 8] + slices[-1:]:
        target = Target(find(id), slice)
        devices = targets.devices(target)
        assert len(devices) == target.devices and {d.device_kind for d in devices} <= set(find(id).device_kinds)


@pytest.mark.parametrize("id", GPUS)
def test_gpus_in_any_number_of_nodes(id):
    domain = find(id).link.domain
    for text in (id, f"{id}:{domain}", f"{id}:3x{domain}", f"{id}:{2048}x{domain}"):
        devices = targets.devices(Target.parse(text))
        assert len(devices) == Target.parse(text).devices
        assert {d.device_kind for d in devices} == set(find(id).device_kinds)


def test_chips_without_a_compiler_say_which_have_one():
    with pytest.raises(InputError, match="XLA compiles for NVIDIA's GPUs and for TPUs.*tpu-v5e"):
        targets.devices(Target.parse("trainium2"))
    with pytest.raises(InputError, match="device_memory_bytes are not in the catalog.*h200-sxm"):
        targets.devices(Target.parse("h800-sxm5"))


@pytest.mark.parametrize("chips, module", [("tpu-v5e:2x2", "libtpu"), ("h200-sxm", "jax_plugins.xla_cuda13")])
def test_a_missing_compiler_is_reported_with_its_installation(monkeypatch, chips, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"is not installed: pip install -e '\.\[compile\]'"):
        targets.devices(Target.parse(chips))


def test_nothing_is_printed_without_a_chip():
    code = (
        "from jaxlm.costs.hardware.target import Target; from jaxlm.lowering.targets import devices\n"
        "print(*(len(devices(Target.parse(on))) for on in ('tpu-v5e:2x2', 'h200-sxm:8')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("4 8\n", "")


def test_the_cache_of_compiled_programs_is_left_alone(tmp_path):
    """JAX writes programs for absent chips to the cache and cannot read them back."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "from jaxlm.costs.hardware.target import Target; from jaxlm.lowering.targets import devices\n"
        "jax.jit(jnp.square).lower(1.0).compile()\n"  # JAX looks for a cache only once
        "mesh = jax.sharding.Mesh(devices(Target.parse('tpu-v5e:1x1')), ['data'])\n"
        "whole = jax.sharding.NamedSharding(mesh, jax.P())\n"
        "jax.jit(jnp.square, in_shardings=whole).lower(1.0).compile()\n"
    )
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **cache}
        )
        assert ran.stderr == ""
    assert len([file for file in tmp_path.iterdir() if file.name.endswith("-cache")]) == 1  # this machine's
