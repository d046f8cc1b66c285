"""Benchmarks compare equal work, and the GPU benchmark runs end to end without a GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import meshes
import model_fixtures
import numpy as np
import pytest

from jaxlm import config
from jaxlm.models import tree
from jaxlm.training.step import TrainStep

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STORIES = Path(__file__).parent / "families" / "stories260K"
CONFIG = """
[model]
vocab_size = 300
context_length = 32
num_layers = 1
d_model = 32
norm = {kind = "rms"}
position = {kind = "rope"}
attention = {num_heads = 4, num_kv_heads = 2}
feed_forward = {d_ff = 64, activation = "silu", gated = true}
[execution]
dtype = "float32"
[training]
batch = 4
"""


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Benchmark files import one another by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_compilations_are_added_to_those_of_the_same_compilers(tmp_path, monkeypatch):
    import results

    file = results.write("memory", "compiled", {"cases": {"a": 1}}, tmp_path)
    assert results.compiled_earlier(file, "cases") == {"a": 1}
    assert results.compiled_earlier(tmp_path / "none.json", "cases") == {}
    monkeypatch.setattr("results.versions", lambda packages: {"jax": "0.1.0"})
    with pytest.raises(
        SystemExit, match=r"memory.json is of jax \d.*, but jax 0.1.0 is installed: run all cases again"
    ):
        results.compiled_earlier(file, "cases")


@pytest.mark.parametrize(
    ("argument", "status", "message"),
    [("--help", 0, "llama3.1-8b on tpu-v5e:16x16"), ("llama3.1-8b in", 2, "no case begins")],
)
def test_nothing_is_compiled_for_help_or_a_name_that_no_case_has(argument, status, message, monkeypatch, capsys):
    import compile_targets

    monkeypatch.setattr(compile_targets, "run", None)
    with pytest.raises(SystemExit) as ended:
        compile_targets.main([argument])
    assert ended.value.code == status and message in " ".join("".join(capsys.readouterr()).split())


def test_steps_of_mixtures_compile_in_ten_minutes_on_two_cores():
    """As recorded."""
    import compile_targets

    for file in (BENCHMARKS / "results").glob("*/compile_targets-mixtures.json"):
        rows = json.loads(file.read_text())["rows"]
        assert rows.keys() == compile_targets.MIXTURES.keys()
        assert all(row["exit_status"] == 0 and row["fits"] and row["seconds"] < 600 for row in rows.values())


def to_pytorch(model, parameters) -> dict:
    """Return jaxlm's parameters under the names and in the layouts of the PyTorch model."""
    names = {"embedding": "tokens", "positions": "positions", "unembedding": "unembedding"}
    found = {f"{name}.weight": parameters[key] for key, name in names.items() if key in parameters}
    if "unembedding" in parameters:
        found["unembedding.weight"] = parameters["unembedding"].T

    def add_norm(name, norm):
        found.update({f"{name}.{'weight' if key == 'scale' else key}": x for key, x in norm.items()})

    add_norm("norm", parameters["final_norm"])
    for i in range(model.num_layers):
        block = jax.tree.map(lambda x, i=i: x[i], parameters["layers"])
        attention, feed_forward, prefix = block["attention"], block["feed_forward"], f"blocks.{i}"
        add_norm(f"{prefix}.norms.0", block["attention_norm"])
        add_norm(f"{prefix}.norms.1", block["feed_forward_norm"])
        qkv = [attention[name].reshape(model.d_model, -1).T for name in ("query", "key", "value")]
        found[f"{prefix}.qkv.weight"] = np.concatenate(qkv)
        found[f"{prefix}.out.weight"] = attention["output"].reshape(-1, model.d_model).T
        if "query_bias" in attention:
            biases = [attention[f"{name}_bias"].reshape(-1) for name in ("query", "key", "value")]
            found[f"{prefix}.qkv.bias"] = np.concatenate(biases)
            found[f"{prefix}.out.bias"] = attention["output_bias"]
        for name in ("gate", "up", "down"):
            if name in feed_forward:
                found[f"{prefix}.{name}.weight"] = feed_forward[name].T
            if f"{name}_bias" in feed_forward:
                found[f"{prefix}.{name}.bias"] = feed_forward[f"{name}_bias"]
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_pytorch_model_is_the_same_model(family):
    torch = pytest.importorskip("torch")
    from pytorch_model import TorchTransformer

    model = model_fixtures.model(model_fixtures.FAMILIES[family])
    draw = np.random.default_rng(0)
    _, abstract = tree.abstract(model)
    parameters = jax.tree.map(lambda s: draw.normal(0, 0.2, s.shape).astype(np.float32), tree.shapes(abstract))
    batch = model_fixtures.batch(rows=2)
    batch["segments"] = np.ones_like(batch["segments"])
    batch["positions"] = np.tile(np.arange(model_fixtures.CONTEXT, dtype=np.int32), (2, 1))
    steps = TrainStep(model, *model_fixtures.sections(batch=2), model_fixtures.optimization())
    total, targets = jax.jit(steps.evaluate)(parameters, batch)

    net = TorchTransformer(model)
    weights = {name: torch.from_numpy(np.array(x)) for name, x in to_pytorch(model, parameters).items()}
    net.load_state_dict(weights)
    assert sum(p.numel() for p in net.parameters()) == tree.parameter_count(model)
    loss = net(*(torch.from_numpy(batch[name]).long() for name in ("tokens", "targets")))
    np.testing.assert_allclose(loss.item(), total / targets, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2-355m", "llama3.2_1b"])
def test_flops_are_those_of_the_formula(name):
    """Both rungs: 6 × matmul parameters × tokens, and 12 · L · T · N · H per token more for whole attention."""
    import train_gpu

    experiment = config.load(train_gpu.find(name))
    model, training = experiment.model, experiment.training
    heads = model.attention.num_heads * model.attention.head_dim
    attention = 12 * model.num_layers * training.batch * training.sequence**2 * heads
    flops = train_gpu.flops(experiment)
    assert flops["model"] == flops["napkin"] + attention
    again = experiment.model_copy(update={"execution": experiment.execution.model_copy(update={"remat": "full"})})
    assert train_gpu.flops(again) == flops


def test_the_small_hybrid_learns_more_than_attention_of_its_size():
    """As recorded. After a change of configs/hybrid.toml: python benchmarks/hybrid.py"""
    import hybrid

    folder, told = BENCHMARKS / "results" / "cpu-avx512-2-cores", (BENCHMARKS / "README.md").read_text()
    recorded, times = (json.loads((folder / f"{name}.json").read_text()) for name in ("hybrid", "hybrid_times"))
    experiments = {name: hybrid.experiment(name) for name in hybrid.MODELS}
    assert recorded["parameters"] == {name: tree.parameter_count(each.model) for name, each in experiments.items()}
    losses = {(row["model"], row["seed"]): row["held_out_loss"] for row in recorded["rows"]}
    assert losses.keys() == {(name, seed) for name in hybrid.MODELS for seed in range(3)}
    assert {row["steps"] for row in recorded["rows"]} == {experiments["hybrid"].training.steps}
    assert all(losses["hybrid", seed] < losses["attention", seed] for seed in range(3))
    assert f"the hybrid is **{recorded['gap']:.3f} lower**" in told
    ratios = [times["cases"][str(length)]["hybrid_over_attention"] for length in hybrid.LENGTHS]
    said = re.search(
        r"takes (\S+) of the time with attention alone in [^,]*, (\S+) in rows of 512 and\s+(\S+) in", told
    )
    assert said.groups() == tuple(f"{ratio:.2f}" for ratio in ratios) and times["tokens"] == hybrid.TOKENS


def test_the_page_has_what_was_recorded_of_mixtures():
    folder, told = BENCHMARKS / "results" / "cpu-avx512-2-cores", (BENCHMARKS / "README.md").read_text()
    learned, speed = (json.loads((folder / f"{name}.json").read_text()) for name in ("mixture", "mixture_speed"))
    losses = {
        name: [row["held_out_loss"] for row in learned["rows"] if row["model"] == name] for name in ("mixture", "dense")
    }
    said = [f"{min(each):.3f} to {max(each):.3f}" for each in losses.values()]
    said.append(f"**{learned['gap']:.3f} lower**, where seeds are {learned['spread']:.3f} apart")
    one, eight, prompt, training = speed["cases"].values()
    beside = [each["transformers"]["jaxlm_over_this"] for each in (one, eight, prompt, training)]
    said.append("{:.2f} of its time for one sequence and {:.2f} for eight".format(*beside[:2]))
    said.append("a prompt of 1,024 tokens {:.2f}, and a training step {:.2f}".format(*beside[2:]))
    said.append(f"that step takes {training['dense']['jaxlm_over_this']:.2f} of a dense model's")
    assert [each for each in said if each not in " ".join(told.split())] == []


def test_the_page_has_how_far_llama_cpp_is_ahead():
    folder, told = BENCHMARKS / "results" / "cpu-avx512-2-cores", (BENCHMARKS / "README.md").read_text()
    cases = json.loads((folder / "decode.json").read_text())["cases"]
    assert [case["rows"] for case in cases] == [1, 8, 1, 8]
    eight, four, sixteen = (
        [case[ours]["median_step_s"] / case[theirs]["median_step_s"] for case in cases]
        for ours, theirs in (
            ("jaxlm w8a8", "llama.cpp Q8_0"),
            ("jaxlm int4", "llama.cpp Q4_0"),
            ("jaxlm bfloat16", "llama.cpp F16"),
        )
    )
    said = [
        "takes {:.2f} and {:.2f} of llama.cpp's time; at one sequence {:.1f} and {:.1f},".format(
            *eight[1::2], *eight[::2]
        )
    ]
    said.append(f"int4 takes {min(four):.1f} to {max(four):.1f} times as long as Q4_0")
    said.append(f"bfloat16 {min(sixteen):.1f} to {max(sixteen):.1f} times as long as F16")
    (float32, bfloat16) = json.loads((folder / "bracket.json").read_text())["calibrations"][0]["peak_flops"].values()
    said.append(f"({bfloat16 / 1e9:.0f} and {float32 / 1e9:.0f} GFLOP/s in")
    assert [each for each in said if each not in " ".join(told.split())] == []


def test_an_h200_has_its_peak():
    import train_gpu

    assert train_gpu.peak_flops("NVIDIA H200", "bfloat16") == 989.4e12
    assert train_gpu.peak_flops("cpu", "bfloat16") is None
    experiment = config.load(train_gpu.find("gpt2-355m"), ["training.batch=16"])
    counted = train_gpu.counted_step(experiment, "NVIDIA H100 80GB HBM3")
    assert 0.04 < counted["lower_bound_s"] < counted["upper_bound_s"] < 0.2 and 15e9 < counted["memory_bytes"] < 40e9
    assert train_gpu.counted_step(experiment, "cpu") is None


def compare(tmp_path, *options) -> dict:
    """Return the results of the training benchmark for one tiny model on this CPU."""
    (tmp_path / "tiny.toml").write_text(CONFIG)
    command = [sys.executable, str(BENCHMARKS / "train_gpu.py"), "--models", str(tmp_path / "tiny.toml")]
    command += ["--blocks", "2", "--steps", "2", "--out", str(tmp_path), "mesh.fsdp=1", *options]
    subprocess.run(command, check=True, timeout=300)
    (written,) = tmp_path.glob("*/train_gpu-tiny-*.json")
    return json.loads(written.read_text())


def test_jaxlm_alone(tmp_path):
    row = compare(tmp_path, "--without-torch", "--batch", "2", "--remat", "full")
    assert [file.name for file in tmp_path.glob("*/*.json")] == ["train_gpu-tiny-mesh.fsdp-1-remat-full.json"]
    assert (row["batch"], row["remat"]) == (2, "full")
    assert len(row["jaxlm"]["blocks_step_s"]) == 2 and row["jaxlm"]["compiled_peak_memory_bytes"] > 0
    assert row["pytorch-compiled"] == {"left_out": "--without-torch"}


@pytest.mark.slow
def test_steps_of_the_engine_know_what_they_read(monkeypatch):
    import decode

    meshes.have(monkeypatch, 1)
    worker = decode.engine_steps(STORIES, rows=2, context=8, width="float32")
    worker.run(2)
    facts = worker.facts()
    # 5 layers of 4 heads of 8 keys and values of float32.
    assert facts["bytes_per_token"] == 5 * 2 * 4 * 8 * 4 and facts["weight_bytes"] > 4 * 260_000


@pytest.mark.exhaustive
@pytest.mark.slow
def test_work_of_the_host_is_a_part_of_a_step():
    import engine_host

    found = engine_host.host_work(str(STORIES), rows=2, context=8, steps=4)
    assert 0 < found["dispatch_s"] + found["plan_and_tokens_s"] < found["step_s"] and 0 < found["host_share"] < 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_decoding_is_measured(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "decode.py"), str(STORIES), "--rows", "2", "--context", "8"]
    command += ["--programs", "jaxlm float32,jaxlm w8a8,jaxlm int4"]
    subprocess.run([*command, "--blocks", "1", "--steps", "2", "--out", str(tmp_path)], check=True, timeout=300)
    (written,) = tmp_path.glob("*/decode.json")
    (case,) = json.loads(written.read_text())["cases"]
    for width in ("float32", "w8a8", "int4"):
        assert case[f"jaxlm {width}"]["median_step_s"] > 0 and case[f"jaxlm {width}"]["read_bound_s"] > 0


@pytest.mark.slow
def test_beside_pytorch(tmp_path):
    pytest.importorskip("torch")
    row = compare(tmp_path)
    assert row["pytorch-compiled"]["median_step_s"] > 0 and row["pytorch-compiled"]["jaxlm_over_this"] > 0


def test_a_worker_that_fails_is_left_out():
    import interleave

    start = "import os, interleave; interleave.serve(lambda: interleave.Worker("
    commands = {
        "good": start + "lambda n: None, lambda: {'device': 'cpu'}))",
        "refusing": start + "lambda n: 1 / 0, dict))",
        "killed": start + "lambda n: os._exit(9), dict))",
    }
    into = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
    worked = interleave.run_interleaved(
        {name: [sys.executable, "-c", into + code] for name, code in commands.items()}, 2, 3
    )
    assert {name: done.failed for name, done in worked.items()} == {
        "good": None,
        "refusing": "ZeroDivisionError: division by zero",
        "killed": "ended with status 9",
    }
    assert len(worked["good"].step_s) == 3 and worked["good"].facts == {"device": "cpu"}


def test_published_weights_take_the_memory_of_their_shards():
    """As recorded; tests/families/test_reading.py measures a smaller checkpoint."""
    import import_memory

    for file in (BENCHMARKS / "results").glob("*/import_memory*.json"):
        cases = json.loads(file.read_text())["cases"]
        is_bounded = ("load", "import") if "mixture" in file.name else ("load",)
        loaded = [row for name, row in cases.items() if name.startswith(is_bounded)]
        assert loaded and cases.keys() == import_memory.CASES.keys()
        assert all(row["beyond_shards_over_largest_tensor"] <= import_memory.MARGIN for row in loaded)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_both_score_the_same_requests():
    import scoring

    found = []
    for name in scoring.WORKERS:
        worker = scoring.worker(name, STORIES, requests=8, choices=4, batch=4, dtype="float32")
        worker.run(1)
        found.append(worker.facts()["mean_logprob"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_bundles_of_attention_on_tpus_are_of_the_blocks_that_it_takes():
    """After a change of the kernels: python benchmarks/tpu_attention.py --only default"""
    import tpu_attention

    from kernels_pallas.flash_attention import mosaic_tpu

    recorded = json.loads(tpu_attention.FILE.read_text())
    rows = recorded["variants"]
    for name, variant in tpu_attention.VARIANTS.items():
        if name in rows and variant.blocks is None:
            assert rows[name]["blocks"] == list(getattr(mosaic_tpu._DEFAULT, variant.kernel))
    gradients = rows["v5p, gradients, default"]["bundles_of_a_head"]
    assert gradients <= 0.7 * tpu_attention.BEFORE["v5p, gradients"]


def test_the_price_of_ordered_additions_is_that_of_the_schedule():
    """After a change of the kernel: python benchmarks/addition_order.py"""
    import addition_order

    recorded = json.loads((addition_order.results.FOLDER / "compiled" / "addition_order.json").read_text())
    (row,) = (row for row in recorded["grid"] if row["steps of an addition"] == 1.0)
    for name, in_order in (("in order", True), ("in any order", False)):
        assert addition_order.grid_steps(1.0, in_order) == row[name]
    for release, counts in recorded["producer"]["in any order"].items():
        ordered = recorded["producer"]["in order"][release]
        assert counts["polls of a counter"] == counts["additions to a counter"] == 0 < ordered["polls of a counter"]
        assert counts["instructions"] < ordered["instructions"]
