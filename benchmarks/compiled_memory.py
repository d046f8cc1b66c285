"""The question: how far is the memory that is counted from what XLA's compilers plan, for chips that are not here?

    python benchmarks/compiled_memory.py [--only TEXT] [--anew] [--jobs N]
    python benchmarks/compiled_memory.py --explain TEXT

Compiles each case in a process of its own and adds it to `results/compiled/memory.json`, where those that are there
are left unless `--anew`, and writes the tables of docs/memory.md. `--only` takes the cases whose names hold a text.
With other compilers than those that wrote the file all cases are compiled anew, or none.
`--explain` says what XLA holds at the peak of such cases, and writes nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results

from jaxlm import config as configuration
from jaxlm.config import Experiment
from jaxlm.core import accelerators
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.step.memory import Memory, memory
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Kind

ROOT = Path(__file__).parents[1]
FILE = results.FOLDER / "compiled" / "memory.json"
PAGE = ROOT / "docs" / "memory.md"
_MARK = "<!-- behind this: written by benchmarks/compiled_memory.py -->\n"


@dataclass(frozen=True)
class Case:
    """A step of a model on chips: `batch` × `sequence` tokens, and overrides of its configuration."""

    kind: Kind
    model: str
    on: str
    batch: int
    sequence: int
    layout: Layout = Layout()
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = "".join(f", {o.removeprefix('training.').removeprefix('model.')}" for o in self.overrides)
        return f"{self.model}, {self.kind}, {self.on}, {self.layout}, {self.batch} × {self.sequence}{settings}"

    def load(self) -> Experiment:
        sizes = f"training.batch={self.batch}", f"training.sequence={self.sequence}"
        return configuration.load(
            ROOT / "configs" / "models" / f"{self.model}.toml", [*sizes, "training.kernels=xla", *self.overrides]
        )

    def counted(self) -> Memory:
        """What the closed form says of one device."""
        work = configuration.workload(self.load(), self.layout, self.kind)
        return memory(work, Target.parse(self.on).chip.kind)


def _cases() -> Iterator[Case]:
    """Each can be wrong for a reason of its own. A few layers stand for all where nothing but their number differs."""
    llama, gpt2, qwen, few = "llama3.1-8b", "gpt2-355m", "qwen3-0.6b", "model.num_layers=4"
    full, fsdp = "training.remat=full", lambda n: Layout(fsdp=n)  # noqa: E731
    keep = "training.remat=[{}]".format(", ".join(f'"{name}"' for name in ("query", "key", "value", "up", "gate")))
    less = 'training.remat=["query", "key", "value"]'
    parts, tensor = "training.microbatches=4", lambda f, t: Layout(fsdp=f, tensor=t)  # noqa: E731

    yield Case("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (full,))
    yield Case("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few, full))
    yield Case("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few, keep))
    yield Case("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few,))
    yield Case("train", llama, "h200-sxm:8", 16, 4096, fsdp(8), (few, full))
    yield Case("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, full, parts))
    yield Case("train", llama, "h200-sxm:8", 32, 2048, Layout(data=2, fsdp=4), (few, full, parts))
    yield Case("train", llama, "h100-sxm5:8", 8, 4096, Layout(data=2, fsdp=4), (few, full))
    yield Case("train", llama, "h100-sxm5:8", 8, 4096, tensor(4, 2), (few, full))
    yield Case("train", llama, "h100-sxm5:8", 2, 4096, tensor(1, 8), (few,))
    yield Case("train", llama, "h100-sxm5:64", 64, 4096, fsdp(64), (full,))
    yield Case("train", llama, "a100-sxm4-80g:8", 8, 2048, fsdp(8), (few, less))
    yield Case("train", gpt2, "h200-sxm", 16, 1024)
    yield Case("train", gpt2, "h200-sxm", 16, 1024, overrides=(full,))
    yield Case("train", gpt2, "a100-sxm4-80g", 16, 1024, overrides=(full, parts))
    yield Case("train", gpt2, "a100-sxm4-80g:8", 64, 1024, fsdp(8))
    yield Case("train", gpt2, "a100-sxm4-80g", 8, 1024, overrides=(full, "training.dtype=float32"))
    yield Case("train", gpt2, "a100-sxm4-80g", 1, 256, overrides=(full,))
    yield Case("train", qwen, "h100-sxm5:8", 16, 2048, fsdp(8))
    yield Case("train", qwen, "h100-sxm5", 8, 2048, overrides=(full, parts))

    yield Case("train", llama, "tpu-v5e:16x16", 256, 4096, fsdp(256), (full,))
    yield Case("train", llama, "tpu-v5p:4x4x4", 64, 4096, fsdp(64), (full,))
    yield Case("train", llama, "tpu-v5e:4x4", 16, 4096, fsdp(16), (few, full))
    yield Case("train", llama, "tpu-v5e:4x4", 4, 4096, tensor(4, 4), (few, full))
    yield Case("train", llama, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few, keep))
    yield Case("train", llama, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few,))
    yield Case("train", llama, "tpu-v5p:2x2x2", 32, 2048, Layout(data=2, fsdp=4), (few, full, parts))
    yield Case("train", llama, "tpu-v6e:4x4", 64, 4096, fsdp(16), (few, full, parts))
    yield Case("train", llama, "tpu-v6e:4x4", 4, 2048, tensor(4, 4), (few,))
    yield Case("train", llama, "tpu-v7x:2x2x2", 16, 4096, fsdp(16), (few, full))
    yield Case("train", gpt2, "tpu-v5e:2x2", 16, 1024, fsdp(4), (full,))
    yield Case("train", gpt2, "tpu-v5p:2x2x1", 16, 1024, fsdp(4))
    short = full, "model.num_layers=2", "model.context_length=2048"  # of room, with the larger batch
    yield Case("train", gpt2, "tpu-v5e:2x2", 64, 2048, fsdp(4), short)
    yield Case("train", gpt2, "tpu-v5e:2x2", 92, 2048, fsdp(4), short)
    yield Case("train", gpt2, "tpu-v6e:2x2", 16, 1024, Layout(data=4), (full,))
    yield Case("train", qwen, "tpu-v6e:2x4", 8, 2048, Layout(data=2, fsdp=2, tensor=2), (less,))
    yield Case("train", qwen, "tpu-v6e:2x2", 32, 2048, Layout(data=4), (full, parts))

    auto = "training.kernels=auto"
    yield Case("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, auto, full))
    yield Case("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, auto))
    yield Case("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (auto, full, parts))
    yield Case("train", gpt2, "a100-sxm4-80g", 16, 1024, overrides=(auto, full))
    yield Case("train", gpt2, "h200-sxm", 16, 1024, overrides=(auto,))
    yield Case("train", qwen, "h100-sxm5:4", 8, 4096, tensor(2, 2), (auto,))
    yield Case("train", llama, "tpu-v5p:2x2x2", 32, 4096, fsdp(8), (few, auto, full))
    yield Case("train", llama, "tpu-v5p:2x2x2", 32, 4096, fsdp(8), (few, auto))
    yield Case("train", qwen, "tpu-v6e:2x2", 8, 4096, tensor(2, 2), (auto,))
    yield Case("prefill", llama, "h200-sxm:8", 32, 4096, fsdp(8), (auto,))

    gemma, small = "gemma2-2b", "model.vocab_size=8192"  # the loss is the peak, and with few tokens a layer
    yield Case("train", gemma, "h200-sxm:8", 8, 4096, fsdp(8), (few, full))
    yield Case("train", gemma, "h200-sxm:8", 8, 4096, fsdp(8), (few, small, full))
    yield Case("train", gemma, "h200-sxm:8", 8, 4096, fsdp(8), (few, small))
    yield Case("train", gemma, "h200-sxm:8", 32, 4096, fsdp(8), (few, small, auto))
    yield Case("train", gemma, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few, full))
    yield Case("train", gemma, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few, small, full))
    yield Case("train", gemma, "tpu-v5p:2x2x2", 8, 4096, fsdp(8), (few, small))
    yield Case("train", gemma, "tpu-v5p:2x2x2", 32, 4096, fsdp(8), (few, small, auto))

    yield Case("prefill", llama, "h200-sxm", 4, 4096)
    yield Case("prefill", llama, "h100-sxm5:8", 8, 4096, tensor(1, 8))
    yield Case("prefill", llama, "tpu-v5e:2x4", 4, 4096, tensor(1, 8))
    yield Case("prefill", llama, "tpu-v5p:2x2x1", 8, 4096, fsdp(4))
    yield Case("prefill", gpt2, "a100-sxm4-80g", 16, 1024)
    yield Case("decode", llama, "h200-sxm", 32, 4096)
    yield Case("decode", llama, "h100-sxm5:8", 64, 4096, tensor(1, 8))
    yield Case("decode", llama, "tpu-v5e:2x4", 16, 4096, tensor(1, 8))
    yield Case("decode", llama, "tpu-v6e:2x2", 32, 2048, fsdp(4))
    yield Case("decode", gpt2, "a100-sxm4-80g", 64, 1024)
    yield Case("decode", qwen, "tpu-v7x:1x1x1", 32, 4096, Layout(data=2))


CASES = {str(case): case for case in _cases()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--anew", action="store_true", help="compile what is in the file again")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compile so many cases at once")
    parser.add_argument("--explain", metavar="TEXT", help="list what is held at the peak of these cases")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return print(json.dumps(compiled(CASES[arguments.worker])))
    if arguments.explain:
        for case in CASES.values():
            if arguments.explain in str(case):
                explain(case)
        return None
    all_anew = arguments.anew and not arguments.only
    rows = {} if all_anew else results.compiled_earlier(FILE, "cases")
    rows = {name: row for name, row in rows.items() if name in CASES}
    wanted = [name for name in CASES if arguments.only in name and (arguments.anew or name not in rows)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed(waiting := {pool.submit(_in_a_process, name): name for name in wanted}):
            rows[waiting[done]] = row = done.result()
            print(f"{waiting[done]}: {total(row) / 1e9:.2f} GB compiled", flush=True)
            write(rows)
    PAGE.write_text(page(PAGE.read_text(), write(rows)))
    return None


def write(rows: dict[str, Any]) -> dict[str, Any]:
    """All that is compiled so far, with what is counted of it: an interrupted run goes on there."""
    ordered = {name: {**rows[name], "counted": CASES[name].counted()._asdict()} for name in CASES if name in rows}
    results.write("memory", "compiled", {"cases": ordered})
    return ordered


def _in_a_process(name: str) -> dict[str, int]:
    """Its memory goes with it."""
    ran = subprocess.run([sys.executable, __file__, "--worker", name], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{name}: {ran.stderr.strip().splitlines()[-1]}")
    return json.loads(ran.stdout.splitlines()[-1])


def compile(case: Case) -> Any:
    """The case's step as XLA compiles it."""
    from jaxlm.lowering import programs, targets
    from jaxlm.parallel.mesh import make_mesh

    accelerators.choose()
    devices = targets.devices(Target.parse(case.on))
    mesh = make_mesh(case.layout, devices)
    return programs.step(case.load(), case.kind, mesh).trace().lower().compile()


def compiled(case: Case) -> dict[str, int]:
    """Bytes on one device, as `jaxlm.lowering.report.CompiledMemory` has them."""
    from jaxlm.lowering.report import memory_of

    said = memory_of(compile(case), Target.parse(case.on).chip)
    return {name: getattr(said, name) for name in ("arguments", "outputs", "temporaries", "gaps")}


def explain(case: Case) -> None:
    """Print what is held at the peak: counted, and the buffers of XLA's program, those alike together."""
    from jaxlm.lowering import buffers, hlo, kernels

    program = hlo.parse(compile(case).as_text())
    held = buffers.peak(program)
    print(f"{case}: counted {_parts(case.counted())}; temporaries {held.bytes / 1e9:.2f} GB")
    kinds: Counter[tuple[str, str, str]] = Counter()
    for buffer in held.buffers:
        kinds[str(buffer.array), kernels.scope(buffer.maker.op_name), program.source(buffer.maker)] += buffer.bytes
    for (array, scope, source), size in kinds.most_common(30):
        print(f"  {size / 1e9:8.3f} GB  {array}  {scope}  {source}")


def _parts(held: Memory) -> str:
    return ", ".join(f"{name} {size / 1e9:.2f}" for name, size in held._asdict().items() if size)


def page(text: str, rows: dict[str, Any]) -> str:
    """The page with its tables as these rows give them."""
    said, mark, _ = text.partition(_MARK)
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
    return said + mark + "\n" + "\n".join(lines)


def total(row: dict[str, int]) -> int:
    """What a device needs: `gaps` lie between what is held and ask for no room."""
    return row["arguments"] + row["outputs"] + row["temporaries"]


if __name__ == "__main__":
    main()
