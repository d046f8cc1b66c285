"""The question: how far is the memory that is counted from what XLA's compilers plan, for chips that are not here?

    python benchmarks/compiled_memory.py [--only TEXT] [--anew] [--explain]

Compiles each case in a process of its own and adds it to `results/compiled/memory.json`; those that are there, of the
same versions, are left. Then writes the table of docs/memory.md. `--explain` says what XLA holds at the peak of the
cases that `--only` chooses, and writes nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import results

from jaxlm import config as configuration
from jaxlm.config import Experiment
from jaxlm.costs.hardware import Target
from jaxlm.costs.memory import memory
from jaxlm.costs.workload import Kind, MeshShape, Workload

ROOT = Path(__file__).parents[1]
FILE = results.FOLDER / "compiled" / "memory.json"
PAGE = ROOT / "docs" / "memory.md"
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_BEGIN, _END = "<!-- written by benchmarks/compiled_memory.py -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Case:
    """A step of a model on chips: `batch` × `sequence` tokens, and overrides of its configuration."""

    kind: Kind
    model: str
    on: str
    batch: int
    sequence: int
    mesh: MeshShape = MeshShape()
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = "".join(f", {o.removeprefix('training.').removeprefix('model.')}" for o in self.overrides)
        return f"{self.model}, {self.kind}, {self.on}, {self.mesh}, {self.batch} × {self.sequence}{settings}"

    def load(self) -> Experiment:
        sizes = f"training.batch={self.batch}", f"training.sequence={self.sequence}"
        return configuration.load(ROOT / "configs" / "models" / f"{self.model}.toml", [*sizes, *self.overrides])

    def work(self) -> Workload:
        return configuration.workload(self.load(), tuple(self.mesh.axes().values()), self.kind)


def _cases() -> Iterator[Case]:
    """Each can be wrong for a reason of its own. A few layers stand for all where nothing but their number differs."""
    llama, gpt2, qwen, few = "llama3.1-8b", "gpt2-355m", "qwen3-0.6b", "model.layers=4"
    full, fsdp = "training.remat=full", lambda n: MeshShape(1, n, 1)  # noqa: E731
    keep = "training.remat=[{}]".format(", ".join(f'"{name}"' for name in ("query", "key", "value", "up", "gate")))
    less = 'training.remat=["query", "key", "value"]'
    parts, tensor = "training.microbatches=4", lambda f, t: MeshShape(1, f, t)  # noqa: E731

    yield Case("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (full,))
    yield Case("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few, full))
    yield Case("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few, keep))
    yield Case("train", llama, "h200-sxm:8", 8, 4096, fsdp(8), (few,))
    yield Case("train", llama, "h200-sxm:8", 16, 4096, fsdp(8), (few, full))
    yield Case("train", llama, "h200-sxm:8", 32, 4096, fsdp(8), (few, full, parts))
    yield Case("train", llama, "h200-sxm:8", 32, 2048, MeshShape(2, 4, 1), (few, full, parts))
    yield Case("train", llama, "h100-sxm5:8", 8, 4096, MeshShape(2, 4, 1), (few, full))
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
    yield Case("train", llama, "tpu-v5p:2x2x2", 32, 2048, MeshShape(2, 4, 1), (few, full, parts))
    yield Case("train", llama, "tpu-v6e:4x4", 64, 4096, fsdp(16), (few, full, parts))
    yield Case("train", llama, "tpu-v6e:4x4", 4, 2048, tensor(4, 4), (few,))
    yield Case("train", llama, "tpu-v7x:2x2x2", 16, 4096, fsdp(16), (few, full))
    yield Case("train", gpt2, "tpu-v5e:2x2", 16, 1024, fsdp(4), (full,))
    yield Case("train", gpt2, "tpu-v5p:2x2x1", 16, 1024, fsdp(4))
    yield Case("train", gpt2, "tpu-v6e:2x2", 16, 1024, MeshShape(4, 1, 1), (full,))
    yield Case("train", qwen, "tpu-v6e:2x4", 8, 2048, MeshShape(2, 2, 2), (less,))
    yield Case("train", qwen, "tpu-v6e:1x1", 8, 2048, overrides=(full, parts))

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
    yield Case("decode", qwen, "tpu-v7x:1x1x1", 32, 4096, MeshShape(2, 1, 1))


CASES = {str(case): case for case in _cases()}
