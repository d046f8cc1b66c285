"""Compare counted memory with XLA's for absent chips (docs/memory.md).

    python benchmarks/compiled_memory.py [--only TEXT] [--recompile] [--jobs N]
    python benchmarks/compiled_memory.py --explain TEXT

Compiles each case in a separate process, adds it to `results/compiled/memory.json`, and writes the tables of
docs/memory.md. Cases in the file are kept unless `--recompile`. `--only` selects the cases whose names contain a text.
The compilers must be those that the file was recorded with, unless all cases are compiled again.
`--explain` lists XLA's live buffers at the peak of the selected cases, and writes nothing.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results

from jaxlm import config as configuration
from jaxlm.config.experiment import Experiment
from jaxlm.config.step_sizes import SIZE_KEYS
from jaxlm.core import accelerators
from jaxlm.costs.counted.memory import Memory, memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Kind

if TYPE_CHECKING:
    from jaxlm.lowering.programs import StepPrograms

ROOT = Path(__file__).parents[1]
# Sections whose keys are told apart without them.
_SECTION = re.compile(r"^(execution|training|model)\.")
FILE = results.FOLDER / "compiled" / "memory.json"
PAGE = ROOT / "docs" / "memory.md"
_MARK = "<!-- from here on written by benchmarks/compiled_memory.py -->\n"


@dataclass(frozen=True)
class MemoryCase:
    """A step of a model on chips, with `batch` × `sequence` tokens and configuration overrides. Unless these say
    otherwise XLA computes everything, and layers run in a loop."""

    kind: Kind
    model: str
    on: str
    batch: int
    sequence: int
    layout: Layout = Layout()
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = "".join(f", {_SECTION.sub('', o)}" for o in self.overrides)
        return f"{self.model}, {self.kind}, {self.on}, {self.layout}, {self.batch} × {self.sequence}{settings}"

    def load(self) -> Experiment:
        batch, sequence = SIZE_KEYS[self.kind]
        sizes = f"{batch}={self.batch}", f"{sequence}={self.sequence}"
        settings = [*sizes, "execution.kernels=xla", "execution.scan_layers=true", *self.overrides]
        return configuration.load(ROOT / "configs" / "models" / f"{self.model}.toml", settings)

    def counted(self) -> Memory:
        """Return the closed-form memory of one device."""
        return memory(Workload.of(self.load(), self.layout, self.kind).on(Target.parse(self.on).chip))


def _cases() -> Iterator[MemoryCase]:
    """Yield the cases; each can fail for its own reason. Few layers stand for all if only their number differs."""
    llama, gpt2, qwen, few = "llama3.1-8b", "gpt2-355m", "qwen3-0.6b", "model.num_layers=4"
    full, fsdp = "execution.remat=full", lambda n: Layout(fsdp=n)  # noqa: E731
    keep = "execution.remat=[{}]".format(", ".join(f'"{name}"' for name in ("query", "key", "value", "up", "gate")))
    less = 'execution.remat=["query", "key", "value"]'
    parts, tensor = "training.microbatches=4", lambda f, t: Layout(fsdp=f, tensor=t)  # noqa: E731

    yield MemoryCase("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (full,))
    yield MemoryCase("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few, full))
    yield MemoryCase("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few, keep))
    yield MemoryCase("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few,))
    yield MemoryCase("train", llama, "h200-sxm:8", 16, 4096, fsdp(8), (few, full))
    yield MemoryCase("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, full, parts))
    yield MemoryCase("train", llama, "h200-sxm:8", 32, 2048, Layout(data=2, fsdp=4), (few, full, parts))
    yield MemoryCase("train", llama, "h100-sxm5:8", 8, 4096, Layout(data=2, fsdp=4), (few, full))
    yield MemoryCase("train", llama, "h100-sxm5:8", 8, 4096, tensor(4, 2), (few, full))
    yield MemoryCase("train", llama, "h100-sxm5:8", 2, 4096, tensor(1, 8), (few,))
    yield MemoryCase("train", llama, "h100-sxm5:64", 64, 4096, fsdp(64), (full,))
    yield MemoryCase("train", llama, "a100-sxm4-80g:8", 8, 2048, fsdp(8), (few, less))
    yield MemoryCase("train", gpt2, "h200-sxm", 16, 1024)
    yield MemoryCase("train", gpt2, "h200-sxm", 16, 1024, overrides=(full,))
    yield MemoryCase("train", gpt2, "a100-sxm4-80g", 16, 1024, overrides=(full, parts))
    yield MemoryCase("train", gpt2, "a100-sxm4-80g:8", 64, 1024, fsdp(8))
    yield MemoryCase("train", gpt2, "a100-sxm4-80g", 8, 1024, overrides=(full, "execution.dtype=float32"))
    yield MemoryCase("train", gpt2, "a100-sxm4-80g", 1, 256, overrides=(full,))
    yield MemoryCase("train", qwen, "h100-sxm5:8", 16, 2048, fsdp(8))
    yield MemoryCase("train", qwen, "h100-sxm5", 8, 2048, overrides=(full, parts))

    yield MemoryCase("train", llama, "tpu-v5e:16x16", 256, 4096, fsdp(256), (full,))
    yield MemoryCase("train", llama, "tpu-v5p:4x4x4", 64, 4096, fsdp(64), (full,))
    yield MemoryCase("train", llama, "tpu-v5e:4x4", 16, 4096, fsdp(16), (few, full))
    yield MemoryCase("train", llama, "tpu-v5e:4x4", 4, 4096, tensor(4, 4), (few, full))
    yield MemoryCase("train", llama, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few, keep))
    yield MemoryCase("train", llama, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few,))
    yield MemoryCase("train", llama, "tpu-v5p:2x2x2", 32, 2048, Layout(data=2, fsdp=4), (few, full, parts))
    yield MemoryCase("train", llama, "tpu-v6e:4x4", 64, 4096, fsdp(16), (few, full, parts))
    yield MemoryCase("train", llama, "tpu-v6e:4x4", 4, 2048, tensor(4, 4), (few,))
    yield MemoryCase("train", llama, "tpu-v7x:2x2x2", 16, 4096, fsdp(16), (few, full))
    yield MemoryCase("train", gpt2, "tpu-v5e:2x2", 16, 1024, fsdp(4), (full,))
    yield MemoryCase("train", gpt2, "tpu-v5p:2x2x1", 16, 1024, fsdp(4))
    short = full, "model.num_layers=2", "model.context_length=2048"  # little free memory with the larger batch
    yield MemoryCase("train", gpt2, "tpu-v5e:2x2", 64, 2048, fsdp(4), short)
    yield MemoryCase("train", gpt2, "tpu-v5e:2x2", 92, 2048, fsdp(4), short)
    yield MemoryCase("train", gpt2, "tpu-v6e:2x2", 16, 1024, Layout(data=4), (full,))
    yield MemoryCase("train", qwen, "tpu-v6e:2x4", 8, 2048, Layout(data=2, fsdp=2, tensor=2), (less,))
    yield MemoryCase("train", qwen, "tpu-v6e:2x2", 32, 2048, Layout(data=4), (full, parts))

    auto = "execution.kernels=auto"
    yield MemoryCase("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, auto, full))
    yield MemoryCase("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, auto))
    yield MemoryCase("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (auto, full, parts))
    yield MemoryCase("train", gpt2, "a100-sxm4-80g", 16, 1024, overrides=(auto, full))
    yield MemoryCase("train", gpt2, "h200-sxm", 16, 1024, overrides=(auto,))
    yield MemoryCase("train", qwen, "h100-sxm5:4", 8, 4096, tensor(2, 2), (auto,))
    yield MemoryCase("train", llama, "tpu-v5p:2x2x2", 32, 4096, fsdp(8), (few, auto, full))
    yield MemoryCase("train", llama, "tpu-v5p:2x2x2", 32, 4096, fsdp(8), (few, auto))
    yield MemoryCase("train", qwen, "tpu-v6e:2x2", 8, 4096, tensor(2, 2), (auto,))
    yield MemoryCase("prefill", llama, "h200-sxm:8", 32, 4096, fsdp(8), (auto,))

    written_out = "execution.scan_layers=false"
    yield MemoryCase("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, auto, written_out))
    yield MemoryCase("train", gpt2, "h200-sxm", 16, 1024, overrides=(auto, written_out))

    lora = "lora.rank=16"
    yield MemoryCase("train", gpt2, "a100-sxm4-80g", 16, 1024, overrides=(auto, full, lora))
    yield MemoryCase("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, auto, full, lora))
    yield MemoryCase("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, auto, lora))
    yield MemoryCase("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few, full, lora))
    yield MemoryCase("train", llama, "tpu-v5p:2x2x2", 32, 4096, fsdp(8), (few, auto, full, lora))

    gemma, small = "gemma2-2b", "model.vocab_size=8192"  # the peak is in the loss; with a small vocabulary, in a layer
    yield MemoryCase("train", gemma, "h200-sxm:8", 8, 4096, fsdp(8), (few, full))
    yield MemoryCase("train", gemma, "h200-sxm:8", 8, 4096, fsdp(8), (few, small, full))
    yield MemoryCase("train", gemma, "h200-sxm:8", 8, 4096, fsdp(8), (few, small))
    yield MemoryCase("train", gemma, "h200-sxm:8", 32, 4096, fsdp(8), (few, small, auto))
    yield MemoryCase("train", gemma, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few, full))
    yield MemoryCase("train", gemma, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few, small, full))
    yield MemoryCase("train", gemma, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few, small))
    yield MemoryCase("train", gemma, "tpu-v5p:2x2x2", 32, 4096, fsdp(8), (few, small, auto))

    # Layers that are written out, with the peak in a layer; and the loss of few tokens within a loop of microbatches.
    one, each = "llama3.2-1b", (few, small, auto, written_out)
    yield MemoryCase("train", one, "h100-sxm5", 8, 2048, overrides=each)
    yield MemoryCase("train", one, "h100-sxm5", 8, 2048, overrides=(*each, less))
    yield MemoryCase("train", one, "h100-sxm5:4", 32, 2048, fsdp(4), each)
    halves = "training.microbatches=2"
    yield MemoryCase("train", one, "h100-sxm5:4", 64, 2048, fsdp(4), (*each, halves))
    yield MemoryCase("train", one, "h200-sxm:4", 8, 2048, Layout(data=2, fsdp=2), (few, auto, full, halves))

    # Recurrent layers, alone, and three before one of attention.
    delta, mamba, short_convolutions = "qwen3.5-27b", "mamba2-2.7b", "lfm2-1.2b"
    narrow = "model.d_model=2048", "model.feed_forward.d_ff=4096"
    yield MemoryCase("train", delta, "h200-sxm", 4, 4096, overrides=(*narrow, *each))
    convolve = "model.pattern=[]", 'model.attention={kind="short_convolution"}'
    yield MemoryCase("train", delta, "h200-sxm", 4, 4096, overrides=(*narrow, few, small, auto, full))
    heads = "num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128"
    alone = *narrow, "model.num_layers=1", "model.pattern=[]", f'model.attention={{kind="gated_delta", {heads}}}', small
    yield MemoryCase("train", delta, "tpu-v6e", 4, 4096, overrides=(*alone, auto))
    yield MemoryCase("train", mamba, "h200-sxm", 4, 4096, overrides=each)
    yield MemoryCase("train", mamba, "h200-sxm", 4, 8192, overrides=each)
    yield MemoryCase("train", mamba, "h200-sxm", 4, 4096, overrides=(few, small, auto, full))
    yield MemoryCase("train", mamba, "h200-sxm", 4, 4096, overrides=(few, small, full))
    yield MemoryCase("train", mamba, "tpu-v6e", 4, 4096, overrides=(few, small, auto))
    yield MemoryCase("train", short_convolutions, "h200-sxm", 4, 4096, overrides=(*convolve, *each))
    yield MemoryCase("train", short_convolutions, "tpu-v6e", 4, 4096, overrides=(*convolve, few, small, auto))

    # Sequences, experts and layers that devices share out.
    big, eight = "llama3.1-405b", (auto, full, "model.num_layers=8")
    yield MemoryCase("train", big, "h100-sxm5:64", 4, 131072, Layout(context=16, tensor=4), eight)
    staged, of_experts = (lambda n: f"training.microbatches={n}"), (*eight, "model.pattern=[]")  # noqa: E731
    deepseek, on_64, on_256 = "deepseek-v3", Layout(pipeline=4, expert=16), Layout(pipeline=8, expert=32)
    yield MemoryCase("train", deepseek, "h100-sxm5:64", 128, 4096, on_64, (*of_experts, staged(8)))
    yield MemoryCase("train", deepseek, "h100-sxm5:256", 512, 4096, on_256, (*of_experts, staged(16)))

    # Experts that are gathered, and latent attention.
    oss, latent, layers = "gpt-oss-20b", "deepseek-v2-lite", lambda n: (auto, full, f"model.num_layers={n}")  # noqa: E731
    yield MemoryCase("train", oss, "h200-sxm:8", 16, 4096, fsdp(8), (auto, full))
    yield MemoryCase("train", oss, "h200-sxm:8", 16, 4096, fsdp(8), layers(8))
    yield MemoryCase("train", oss, "tpu-v5e:8x8", 64, 4096, fsdp(64), (auto, full))
    yield MemoryCase("train", oss, "tpu-v5e:4x4", 16, 4096, fsdp(16), layers(4))
    yield MemoryCase("train", latent, "h200-sxm:8", 16, 4096, fsdp(8), layers(4))
    yield MemoryCase("train", latent, "tpu-v5e:4x4", 16, 4096, fsdp(16), layers(4))

    yield MemoryCase("prefill", llama, "h200-sxm", 4, 4096)
    yield MemoryCase("prefill", llama, "h100-sxm5:8", 8, 4096, tensor(1, 8))
    yield MemoryCase("prefill", llama, "tpu-v5e:2x4", 4, 4096, tensor(1, 8))
    yield MemoryCase("prefill", llama, "tpu-v5p:2x2x1", 8, 4096, fsdp(4))
    yield MemoryCase("prefill", gpt2, "a100-sxm4-80g", 16, 1024)
    yield MemoryCase("prefill", gpt2, "tpu-v5e:1x1", 16, 1024)
    yield MemoryCase("decode", llama, "h200-sxm", 32, 4096)
    yield MemoryCase("decode", llama, "h100-sxm5:8", 64, 4096, tensor(1, 8))
    yield MemoryCase("decode", llama, "tpu-v5e:2x4", 16, 4096, tensor(1, 8))
    yield MemoryCase("decode", llama, "tpu-v6e:2x2", 32, 2048, Layout(data=2, tensor=2))
    yield MemoryCase("decode", gpt2, "a100-sxm4-80g", 64, 1024)
    yield MemoryCase("decode", gpt2, "tpu-v5e:1x1", 8, 1024)
    yield MemoryCase("decode", qwen, "tpu-v7x:1x1x1", 32, 4096, Layout(data=2))


CASES = {str(case): case for case in _cases()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--recompile", action="store_true", help="compile cases again that are in the file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of parallel compilations")
    parser.add_argument("--explain", metavar="TEXT", help="list the live buffers at the peak of these cases")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return print(json.dumps(compiled(CASES[arguments.worker])))
    if arguments.explain:
        for case in CASES.values():
            if arguments.explain in str(case):
                explain(case)
        return None
    all_again = arguments.recompile and not arguments.only
    rows = {} if all_again else results.compiled_earlier(FILE, "cases")
    rows = {name: row for name, row in rows.items() if name in CASES}
    wanted = [name for name in CASES if arguments.only in name and (arguments.recompile or name not in rows)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed(waiting := {pool.submit(_in_a_process, name): name for name in wanted}):
            rows[waiting[done]] = row = done.result()
            print(f"{waiting[done]}: {total(row) / 1e9:.2f} GB compiled", flush=True)
            write(rows)
    PAGE.write_text(page(PAGE.read_text(), write(rows)))
    return None


def write(rows: dict[str, Any]) -> dict[str, Any]:
    """Write the compiled and counted figures so far, from which an interrupted run resumes."""
    ordered = {name: {**rows[name], "counted": CASES[name].counted()._asdict()} for name in CASES if name in rows}
    results.write("memory", "compiled", {"cases": ordered})
    return ordered


def _in_a_process(name: str) -> dict[str, int]:
    """Compile in a separate process, which frees its memory when it ends."""
    ran = subprocess.run([sys.executable, __file__, "--worker", name], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{name}: {ran.stderr.strip().splitlines()[-1]}")
    return json.loads(ran.stdout.splitlines()[-1])


def programs_of(case: MemoryCase) -> "StepPrograms":
    """Return the programs of the case's step."""
    from jaxlm.lowering import targets
    from jaxlm.lowering.programs import step_programs
    from jaxlm.parallel.mesh import make_mesh

    accelerators.choose()
    devices = targets.devices(Target.parse(case.on))
    mesh = make_mesh(case.layout, devices)
    return step_programs(case.load(), case.kind, mesh)


def compiled(case: MemoryCase) -> dict[str, int]:
    """Return the recorded fields of `jaxlm.lowering.held_memory.CompiledMemory`, in bytes on one device."""
    from jaxlm.lowering.held_memory import memory_of, memory_together

    programs, chip = programs_of(case), Target.parse(case.on).chip
    held = memory_together(programs, [each and memory_of(each.compile(), chip) for each in programs])
    return {name: getattr(held, name) for name in ("arguments", "outputs", "temporaries", "gaps")}


def explain(case: MemoryCase) -> None:
    """Print the memory at the peak: counted, and the buffers of XLA's program with most temporaries, grouped."""
    from jaxlm.lowering import buffers, hlo

    parsed = [hlo.parse(each.compile().as_text()) for each in programs_of(case) if each is not None]
    program = max(parsed, key=lambda program: buffers.peak(program).bytes)
    held = buffers.peak(program)
    print(f"{case}: counted {_parts(case.counted())}; temporaries {held.bytes / 1e9:.2f} GB")
    kinds: Counter[tuple[str, str, str]] = Counter()
    for buffer in held.buffers:
        kinds[str(buffer.array), hlo.scope(buffer.maker.op_name), program.source(buffer.maker)] += buffer.bytes
    for (array, scope, source), size in kinds.most_common(30):
        print(f"  {size / 1e9:8.3f} GB  {array}  {scope}  {source}")


def _parts(held: Memory) -> str:
    return ", ".join(f"{name} {size / 1e9:.2f}" for name, size in held._asdict().items() if size)


def page(text: str, rows: dict[str, Any]) -> str:
    """Return the page with its tables written from these rows."""
    prose, mark, _ = text.partition(_MARK)
    errors = {name: sum(row["counted"].values()) / total(row) - 1 for name, row in rows.items()}
    sizes = [abs(error) for error in errors.values()]
    near, far = (sum(size <= limit for size in sizes) for limit in (0.05, 0.15))
    lines = [
        f"{len(rows)} cases: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}; {near} within 5 %, "
        f"{far} within 15 %.",
        "",
    ]
    for kind in ("train", "prefill", "decode"):
        lines += [f"### {kind}", "", "| case | counted, GB | compiled, GB | error |", "| --- | --- | --- | --- |"]
        for name, row in rows.items():
            if CASES[name].kind == kind:
                counted = sum(row["counted"].values()) / 1e9
                name_ = name.replace(f", {kind}", "")
                lines.append(f"| {name_} | {counted:.2f} | {total(row) / 1e9:.2f} | {errors[name]:+.1%} |")
        lines.append("")
    return prose + mark + "\n" + "\n".join(lines)


def total(row: dict[str, int]) -> int:
    """Return the bytes that a device needs, without `gaps` between buffers, which need no memory."""
    return row["arguments"] + row["outputs"] + row["temporaries"]


if __name__ == "__main__":
    main()
