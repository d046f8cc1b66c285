"""The bytes that a training step moves on an H100 that is not here, from XLA's program.

    python benchmarks/step_bytes.py [--only TEXT] [--whole]

Compiles the step of each case with 2 and with 3 layers, whose difference is a layer's bytes, and adds to
`results/compiled/step_bytes.json` the bytes, launches and temporaries of both, and the bytes of the model's own number
of layers by that difference; `--whole` compiles that number too. Bytes are read and written in device memory by all
kernels (`jaxlm.lowering.launched_kernels`). Cases in the file are compiled again where `--only` selects them, and kept
otherwise, as are its `variants`: programs of earlier commits, and of changes that were not kept. XLA does not measure
products for a chip that is not there, so that the program on the chip may differ.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results

from jaxlm import config as configuration
from jaxlm.core import accelerators
from jaxlm.costs.hardware.target import Target

ROOT = Path(__file__).parents[1]
FILE = results.FOLDER / "compiled" / "step_bytes.json"
CHIP = "h100-sxm5"
FEW = 2, 3
LOOP, WRITTEN_OUT = "execution.scan_layers=true", "execution.scan_layers=false"


@dataclass(frozen=True)
class StepCase:
    """A training step of a model file with configuration overrides."""

    name: str
    file: Path
    overrides: tuple[str, ...]

    def compiled(self, layers: int | None = None) -> dict[str, Any]:
        """Compile the step with so many layers, or the model's own number."""
        from jaxlm.lowering import hlo, targets
        from jaxlm.lowering.launched_kernels import kernels
        from jaxlm.lowering.programs import step_programs
        from jaxlm.parallel.layout import Layout
        from jaxlm.parallel.mesh import make_mesh

        accelerators.choose()
        changed = () if layers is None else (f"model.num_layers={layers}",)
        experiment = configuration.load(self.file, [*self.overrides, *changed])
        mesh = make_mesh(Layout(), targets.devices(Target.parse(CHIP)))
        program = step_programs(experiment, "train", mesh).step.compile()
        launched = kernels(hlo.parse(program.as_text()))
        moved: Counter[str] = Counter()
        for kernel in launched:
            kind = "pallas" if "triton" in kernel.kind else "products" if kernel.matmul_flops else "other"
            moved[kind] += kernel.bytes * kernel.count
        return {
            "bytes": moved.total(),
            "bytes_by_kind": dict(sorted(moved.items())),
            "launches": sum(kernel.count for kernel in launched),
            "temporaries": program.memory_analysis().temp_size_in_bytes,
        }

    def layers(self) -> int:
        """Return the model's number of layers."""
        return configuration.load(self.file, self.overrides).model.num_layers


def _cases() -> list[StepCase]:
    gpt2 = ROOT / "configs" / "models" / "gpt2-355m.toml", ("training.batch=16", "training.sequence=1024")
    llama = Path(__file__).parent / "llama3.2_1b.toml", ("training.batch=4", "training.sequence=2048")
    named = {
        "gpt2-355m": 'execution.remat=["query", "key", "value", "attention", "up"]',
        "llama3.2-1b": 'execution.remat=["query", "key", "value", "attention", "up", "gate"]',
    }
    cases = []
    for name, (file, sizes) in (("gpt2-355m", gpt2), ("llama3.2-1b", llama)):
        for form, settings in (
            ("written out", (WRITTEN_OUT, "execution.remat=none")),
            ("loop, named remat", (LOOP, named[name])),
            ("loop", (LOOP, "execution.remat=none")),
        ):
            cases.append(StepCase(f"{name}, {form}", file, (*sizes, *settings)))
    return cases


CASES = {case.name: case for case in _cases()}


def few_layers(case: StepCase) -> dict[str, Any]:
    """Compile a case with few layers, and return both with what follows for all of its layers."""
    fewer, more = (case.compiled(layers) for layers in FEW)
    of_layer = {key: (more[key] - fewer[key]) // (FEW[1] - FEW[0]) for key in ("bytes", "launches")}
    all_layers = {key: fewer[key] + each * (case.layers() - FEW[0]) for key, each in of_layer.items()}
    return {"few": dict(zip(map(str, FEW), (fewer, more), strict=True)), "of_layer": of_layer, "by_few": all_layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="compile the cases whose names contain it")
    parser.add_argument("--whole", action="store_true", help="compile all layers of these cases too")
    arguments = parser.parse_args()
    rows = {name: row for name, row in results.compiled_earlier(FILE, "cases").items() if name in CASES}
    variants = json.loads(FILE.read_text())["variants"] if FILE.exists() else {}
    for name, case in CASES.items():
        if arguments.only not in name:
            continue
        row = few_layers(case)
        if arguments.whole:
            row["whole"] = case.compiled()
        rows[name] = {**rows.get(name, {}), **row}
        ordered = {name: rows[name] for name in CASES if name in rows}
        results.write("step_bytes", "compiled", {"cases": ordered, "variants": variants})
        print(f"{name}: {row['by_few']['bytes'] / 1e9:.1f} GB, {row['by_few']['launches']} launches", flush=True)


if __name__ == "__main__":
    main()
