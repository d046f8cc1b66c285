"""A calibration of this machine with fixed figures, so that no test waits 20 s for one, and all count with the same."""

from pathlib import Path

from jaxlm.costs.hardware import calibration
from jaxlm.costs.hardware.chips import Chip, OnChip
from jaxlm.costs.hardware.sustained import AttentionRates, Launches, PassRates, ProductRates, Sustained

_GIVEN = {"source": "the figures of a CPU with two cores", "spread": 0.3}
_PRODUCTS = ((32.0, 4e10), (128.0, 1.5e11), (256.0, 2e11), (512.0, 2e11))
_PASSES = ((1e6, 1e10), (1e7, 2e10), (1e8, 2e10))
_ATTENTION = ((64.0, 2e10), (256.0, 2e10), (1024.0, 2e10))


def keep(folder: Path) -> None:
    """Write the calibration to this folder of `jaxlm/hardware`, where JAX runs on a CPU; jaxlm measures no other."""
    here = calibration.machine()
    if here.platforms != "cpu":
        return
    memory = 16 * 10**9
    chip = Chip(
        id=calibration.HOST,
        name=here.cpu,
        vendor="this machine",
        kind="cpu",
        peak_flops={"float32": 2.5e11, "bfloat16": 2e11},
        memory_bytes=memory,
        device_memory_bytes=memory,
        memory_bytes_per_s=2e10,
        on_chip=OnChip(core="core", cores=here.cores),
        sustained=Sustained(
            products=tuple(
                ProductRates(dtype=dtype, batched=batched, rates=_PRODUCTS, **_GIVEN)
                for batched in (False, True)
                for dtype in ("float32", "bfloat16")
            ),
            passes=tuple(PassRates(kind=kind, rates=_PASSES, **_GIVEN) for kind in ("pass", "optimizer", "weights")),
            attention=tuple(
                AttentionRates(
                    kernel="xla",
                    direction="training",
                    mask="causal",
                    head_dim=head_dim,
                    dtype="float32",
                    rates=_ATTENTION,
                    **_GIVEN,
                )
                for head_dim in (16, 32, 128)
            ),
            launches=(Launches(kernel_s=5e-7, eager_s=5e-6, step_s=5e-6, token_s=0.0, **_GIVEN),),
        ),
        sources={"tests": ("peak_flops", "memory_bytes_per_s", "memory_bytes", "device_memory_bytes", "on_chip")},
    )
    with_machine = calibration.Calibration(format=calibration._FORMAT, machine=here, device_kind="cpu", chip=chip)
    (folder / "host.json").write_text(with_machine.model_dump_json())
