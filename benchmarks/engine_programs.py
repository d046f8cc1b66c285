"""The launches of the engine's decoding step, and the bytes that it reads, on chips that are not here, from XLA's
program.

    python benchmarks/engine_programs.py [--only TEXT]

Compiles the step in which every slot decodes one token, and adds to `results/compiled/engine_programs.json` its
launches (those in loops as often as they run) and loops, how often each weight is read, what is copied whole, and how
much of the cache is read at a length of all sequences, beside what is counted. Cases in the file are compiled again
where `--only` selects them, and kept otherwise.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results

from jaxlm import config as configuration
from jaxlm.core import accelerators
from jaxlm.costs.hardware.target import Target

ROOT = Path(__file__).parents[1]
FILE = results.FOLDER / "compiled" / "engine_programs.json"


@dataclass(frozen=True)
class DecodingCase:
    """A model on chips, all of which split its heads, with sequences that have read so many tokens."""

    model: str
    on: str
    sequences: int
    length: int

    def __str__(self) -> str:
        return f"{self.model}, {self.on}, {self.sequences} × {self.length}"


CASES = {
    str(case): case
    for case in (
        DecodingCase("llama3.1-8b", "h100-sxm5:1", 1, 2048),
        DecodingCase("qwen3-0.6b", "h200-sxm:1", 8, 2048),
        DecodingCase("qwen3-0.6b", "tpu-v6e:1x1", 8, 2048),
        DecodingCase("llama3.1-8b", "h200-sxm:1", 64, 2048),
        DecodingCase("llama3.1-8b", "tpu-v6e:1x1", 32, 2048),
        DecodingCase("llama3.1-70b", "h200-sxm:8", 64, 2048),
    )
}


def read(case: DecodingCase) -> dict[str, Any]:
    """Compile a case. Return its launches and loops, and bytes on one device: of weights and their reads, of the cache
    and its reads."""
    import jax.numpy as jnp

    from jaxlm.inference.cache_memory import CacheSize
    from jaxlm.inference.programs import EnginePrograms
    from jaxlm.inference.settings import EngineSettings
    from jaxlm.inference.step_shapes import TILE, StepShape
    from jaxlm.lowering import hlo, launched_kernels, targets
    from jaxlm.lowering.argument_reads import argument_reads
    from jaxlm.lowering.held_memory import memory_of
    from jaxlm.parallel.layout import Layout
    from jaxlm.parallel.mesh import make_mesh

    accelerators.choose()
    target = Target.parse(case.on)
    mesh = make_mesh(Layout(tensor=target.devices), targets.devices(target))
    model = configuration.load(ROOT / "configs" / "models" / f"{case.model}.toml", []).model
    settings = EngineSettings(slots=case.sequences)
    programs = EnginePrograms.of(model, mesh, jnp.dtype("bfloat16"), settings)
    pages = -(-case.length // settings.page)
    cache = CacheSize(pages * settings.page, tuple(pages * case.sequences + 1 for _ in programs.layout.groups))
    began = time.perf_counter()
    compiled = programs.step(StepShape(case.sequences, 0, TILE), cache).compile()
    seconds = time.perf_counter() - began
    program = hlo.parse(compiled.as_text(), trips=pages)
    instructions = [each for part in program.computations.values() for each in part.instructions.values()]
    reads = argument_reads(program)
    weights = [each for each in reads if each.name.startswith("parameters")]
    stored = [each for each in reads if each.name.startswith("pages")]
    matrices = [each for each in weights if each.bytes > 1 << 20]
    counted = pages * case.sequences * sum(programs.page_bytes)
    memory = memory_of(compiled, target.chip)
    return {
        "compile_s": round(seconds, 1),
        "launches": sum(kernel.count for kernel in launched_kernels.kernels(program)),
        "loops": sum(each.opcode == "while" for each in instructions),
        "weights": sum(each.bytes for each in weights),
        "weights_read": sum(each.read for each in weights),
        "weights_copied": sum(each.copied for each in weights),
        "most_reads_of_a_matrix": max(each.read / each.bytes for each in matrices),
        "cache_counted": counted,
        "cache_read": sum(each.read for each in stored),
        "cache_copied": sum(each.copied for each in stored),
        "temporaries": memory.temporaries,
        "peak": memory.peak,
        "capacity": memory.capacity,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="compile the cases whose names contain a text")
    arguments = parser.parse_args()
    rows = results.compiled_earlier(FILE, "bytes_per_device")
    for name, case in CASES.items():
        if arguments.only in name if arguments.only is not None else name not in rows:
            rows[name] = read(case)
            print(f"{name}: {json.dumps(rows[name])}", flush=True)
            ordered = {known: rows[known] for known in CASES if known in rows}
            results.write("engine_programs", "compiled", {"bytes_per_device": ordered})


if __name__ == "__main__":
    main()
