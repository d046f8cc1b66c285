"""Memory in closed form against XLA's: as it was compiled for the table of docs/memory.md, and compiled here."""

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import meshes
import model_fixtures
import pytest
from workload_fixtures import changed, workload

from jaxlm.costs.counted import gathered_memory
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.layer_memory import kept
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.counted.parameters import parameters
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.workload import Workload

ROOT = Path(__file__).parents[3]
BENCHMARK = ROOT / "benchmarks" / "compiled_memory.py"
ROWS = json.loads((ROOT / "benchmarks" / "results" / "compiled" / "memory.json").read_text())["cases"]


@pytest.fixture
def compiled_memory(monkeypatch):
    """The benchmark, where products have the precision that it compiles with, not that of the tests."""
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    import compiled_memory

    with jax.default_matmul_precision(None):
        yield compiled_memory


def test_the_table_is_what_the_file_says(compiled_memory):
    text = compiled_memory.PAGE.read_text()
    assert compiled_memory.page(text, ROWS) == text


def test_the_closed_form_gives_what_the_file_says(compiled_memory):
    for name, row in ROWS.items():
        assert compiled_memory.CASES[name].counted()._asdict() == row["counted"], name


# On a GPU and on a TPU, with the peak in training and without it. The table of docs/memory.md aims at 5 %.
SMALL = (
    "gpt2-355m, train, a100-sxm4-80g, one device, 16 × 1024, remat=full, microbatches=4",
    "gpt2-355m, prefill, a100-sxm4-80g, one device, 16 × 1024",
    "llama3.1-8b, prefill, tpu-v5e:2x4, tensor 8, 4 × 4096",
)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.exhaustive  # tests/lowering/test_report.py has the memory of a small step
@pytest.mark.parametrize("name", SMALL)
def test_what_compilers_say_here_is_near_what_is_counted(name, compiled_memory):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # the tests' own, for CPUs
    command = [sys.executable, str(BENCHMARK), "--worker", name]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    compiled = compiled_memory.total(json.loads(said.stdout.splitlines()[-1]))
    assert compiled_memory.CASES[name].counted().total == pytest.approx(compiled, rel=0.05)


@pytest.mark.parametrize("chip", ["gpu", "tpu"])
@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_less_of_anything_never_takes_more(kind, chip):
    layout, model = meshes.layout(1, 2, 2), model_fixtures.model(context_length=64)
    base = workload(kind, model, 16, 64, layout=layout, kernels="xla", platform=chip, page=32)
    whole = memory(base).total
    for change in (
        {"batch": 8},
        {"sequence": 32},
        {"model": model_fixtures.model(num_layers=1, context_length=64)},
        {"layout": meshes.layout(2, 4, 2)},
    ):
        assert memory(changed(base, **change)).total < whole
    if kind == "train":
        for change in ({"remat": ("query",)}, {"remat": "full"}, {"optimizer": "sgd"}):
            assert memory(changed(base, **change)).total < whole
        assert memory(changed(base, average=True)).total > whole


@pytest.mark.parametrize("name", [name for name in ROWS if "scan_layers=false" in name])
def test_layers_written_out_are_counted_as_they_are_compiled(name, compiled_memory):
    """Counted as a loop, four layers of Llama 3.2 1B would take 15 % more than compiled."""
    case = compiled_memory.CASES[name]
    work = Workload.of(case.load(), case.layout, case.kind).on(Target.parse(case.on).chip)
    compiled, found = compiled_memory.total(ROWS[name]), memory(work)
    assert found.total == pytest.approx(compiled, rel=0.05)
    in_a_loop = memory(work.with_execution(scan_layers=True))
    assert found.activations <= in_a_loop.activations and found.gradients <= in_a_loop.gradients


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_loop_of_one_layer_is_written_out(remat):
    """XLA writes it out. A layer of Qwen3.5 on a TPU, counted as a loop, would take 8.1 GB for 5.4 GB."""
    one, two = (
        workload("train", model_fixtures.model(num_layers=n), 64, 32, remat=remat, platform="tpu") for n in (1, 2)
    )
    loop, by_layer = (memory(changed(one, scan_layers=in_loop)) for in_loop in (True, False))
    assert (loop.activations, loop.gradients) == (by_layer.activations, by_layer.gradients)
    assert memory(changed(two, scan_layers=True)).activations > memory(changed(two, scan_layers=False)).activations


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parameters_are_copied_into_the_layout_that_a_gpu_gathers(microbatches):
    """`output` and `down`, which end in the embedding's dimension, and the table of a loop over microbatches: Llama 3.2
    1B on four H200 in two parts holds bf16[1024,128256], bf16[1024,4,8192] and bf16[1024,4,32,64]."""
    work = workload("train", model_fixtures.model(), 16, 32, microbatches=microbatches, dtype="bfloat16", remat="full")
    work, shards = changed(work, platform="gpu", scan_layers=True, layout=meshes.layout(1, 4, 1)), 4
    names = ["output", "down", *["embedding"] * (microbatches > 1)]
    declared = parameters(work.model)
    copied = sum(math.prod(d.shape) for path, d in declared.items() if path.rpartition("/")[2] in names)
    assert sum(gathered_memory.laid_out_again(device_step(work)).values()) == 2 * copied // shards
    assert not gathered_memory.laid_out_again(device_step(changed(work, platform="tpu")))
    assert not gathered_memory.laid_out_again(device_step(changed(work, layout=meshes.layout(4, 1, 1))))


@pytest.mark.parametrize("mesh", [meshes.layout(), meshes.layout(2, 2, 2)], ids=str)
@pytest.mark.parametrize("remat, masks", [("none", 7), ("full", 1), (("query", "up"), 1)], ids=str)
def test_masks_of_dropout_are_a_byte_for_each_number(remat, masks, mesh):
    """Two masks in each of three layers if nothing is recomputed, and one for the embedding. GPT-2 355M with eight
    layers, 16 × 1024 on H200, takes 17 masks of 16.8 MB more according to XLA, and one with full rematerialisation."""
    work = workload("train", model_fixtures.model(), 16, 32, remat=remat, layout=mesh, kernels="xla")
    assert kept(device_step(changed(work, dropout=True))) - kept(device_step(work)) == masks * 16 * 32 * 32 // mesh.size
    assert memory(changed(work, dropout=True)).total >= memory(work).total


def test_layers_before_all_that_trains_keep_nothing():
    model = model_fixtures.model()
    probe = frozenset(parameters(model)) - {"unembedding"}
    work = workload("train", model, 1024, 32, frozen=probe, kernels="xla")
    assert memory(work).activations == memory(changed(work, remat="full")).activations
    assert memory(work).total < memory(changed(work, frozen=frozenset(), remat="full")).total


def test_the_peak_moves_with_what_is_large():
    """Long rows fill it with scores, a large vocabulary with logits, keeping everything with what layers keep."""
    base = workload("train", model_fixtures.model(), 16, 32, remat="full", kernels="xla")

    def largest(work):
        held = memory(work)._asdict()
        return max(held, key=held.get)

    assert largest(changed(base, model=model_fixtures.model(vocab_size=100_000), batch=1024)) == "logits"
    assert largest(changed(base, sequence=4096)) == "activations"
    assert largest(changed(base, batch=1, sequence=1)) == "optimizer"
