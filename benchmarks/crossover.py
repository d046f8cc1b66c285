"""Draw which mesh is the fastest on how many devices: `python benchmarks/crossover.py docs/crossover.png`.

Two models, a dense one and a mixture, on two networks, nodes of eight GPUs and a torus of TPUs, with one batch on more
and more devices. A curve is the best of the meshes with one kind of axis beside `data` and `fsdp`, each as `jaxlm plan`
counts it with its best microbatches and rematerialisation. It prints the fastest mesh for each number of devices.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from jaxlm import config
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import Plan
from jaxlm.costs.plan_order import TIE
from jaxlm.costs.search import best_on
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import Layout

MODELS = ("llama3.1-70b", "qwen3-235b-a22b")
NETWORKS = {"h100-sxm5": "H100, nodes of 8 on InfiniBand", "tpu-v5p": "TPU v5p, 3D torus"}
BATCH, SEQUENCE = 512, 8192
DEVICES = tuple(2**n for n in range(6, 13))
# Axes by their color; the first alone, the others beside it.
AXES = {"fsdp": "#22313f", "tensor": "#e4572e", "context": "#4c78a8", "expert": "#54a24b", "pipeline": "#f2a541"}


def meshes(axis: str, devices: int) -> Iterator[Layout]:
    """Yield meshes of a number of devices with several along an axis, beside `data` and `fsdp`, and of a pipeline also
    beside the `tensor` of a node."""
    sizes = [{}] if axis == "fsdp" else [{axis: 2**n} for n in range(1, 7)]
    if axis == "pipeline":
        sizes += [{**each, "tensor": 8} for each in sizes]
    for inner, data in itertools.product(sizes, (1, 16)):
        rest, over = divmod(devices, data * math.prod(inner.values()))
        if rest and not over:
            yield Layout(data=data, fsdp=rest, **inner)


def fastest(axis: str, work: Workload, target: Target) -> Plan | None:
    """Return the fastest plan with this axis; None where no mesh holds the step, or divides it."""
    plans = (best_on(layout, work, target) for layout in meshes(axis, target.devices))
    return min((plan for plan in plans if plan), key=lambda plan: plan.time.expected, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    picture = parser.parse_args().picture
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(len(MODELS), len(NETWORKS), sharex=True, sharey=True)
    for row, name in zip(panels, MODELS, strict=True):
        for panel, (chip, network) in zip(row, NETWORKS.items(), strict=True):
            work = Workload("train", config.load(name).model, BATCH, SEQUENCE)
            panel.set_title(f"{name} on {network}", fontsize=10)
            best: dict[int, tuple[float, str]] = {}
            for axis, color in AXES.items():
                if axis == "expert" and "experts" not in {a for d in work.parameters.values() for a in d.axes}:
                    continue
                plans = {n: fastest(axis, work, Target.parse(f"{chip}:{n}")) for n in DEVICES}
                found = {n: plan for n, plan in plans.items() if plan}
                panel.plot(list(found), [100 * p.mfu for p in found.values()], "o-", color=color, label=axis, ms=3)
                for n, plan in found.items():
                    if plan.mfu > best.get(n, (0.0, ""))[0] * (1 + TIE):
                        best[n] = plan.mfu, f"{plan.work.layout}"
            print(f"{name}, {network}", *(f"{n:>5}  {mfu:.1%}  {mesh}" for n, (mfu, mesh) in best.items()), sep="\n  ")
            panel.set_xscale("log", base=2)
            panel.set_xticks(DEVICES, [str(n) for n in DEVICES])
            panel.grid(alpha=0.3)
    panels[-1][0].legend(fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("devices")
    for row in panels:
        row[0].set_ylabel("MFU, %")
    figure.suptitle(f"One batch of {BATCH} × {SEQUENCE:,} tokens, the best mesh with each axis", fontsize=11)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
