"""train, eval and generate as a user calls them: each in a process of its own, where that matters."""

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from jaxlm.cli import main
from jaxlm.training import checkpoints

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = (
    "training.steps=12", "training.batch=4", "training.sequence=64", "training.log_every=5",
    "model.vocab_size=512", "model.d_model=64", "model.num_layers=1", "model.attention.head_dim=8",
    "model.feed_forward.d_ff=96", "evaluation.every=6", "evaluation.batches=2", "checkpoint.every=6",
)  # fmt: skip


def jaxlm(*arguments, devices=1, status=0):
    code = "import sys; from jaxlm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env=runs.environment(devices), timeout=300)
    assert ended.returncode == status, ended.stderr
    return ended


def printed(capsys, *arguments):
    """Return what a command prints, called here: a process that only evaluates or generates takes as long to start."""
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.py").write_text("".join(f"def f{j}(x):\n    return x + {i * j}\n\n\n" for j in range(20)))
    return folder


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    changes = f"data.text={text}", "data.held_out=0.3", "training.ema_decay=0.5", "mesh.fsdp=1"
    asked = "train", str(CONFIGS / "quickstart.toml"), *SMALL, *changes, "--out", str(folder), "--json"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*asked]) == 0
    (folder / "stdout").write_text(out.getvalue())
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_train_prints_one_json_object(run):
    printed = json.loads((run / "stdout").read_text())
    assert printed["step"] == 12 and math.isfinite(printed["held_out_loss"])


@pytest.mark.slow
def test_a_run_holds_what_it_should(run):
    assert {p.name for p in run.iterdir()} >= {
        "config.toml", "data.json", "attempts.jsonl", "tokenizer.json", "metrics.jsonl", "evaluations.jsonl",
        "checkpoints", "loss.png", "sample.txt", "ladder.json",
    }  # fmt: skip
    metrics = lines(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 5, 10, 12]
    for row in metrics:
        assert {"step", "loss", "step_s", "tokens_per_s", "mfu", "grad_norm", "learning_rate"} <= row.keys()
        assert row["step_s"] > 0 and row["tokens_per_s"] > 0 and row["grad_norm"] > 0 and 0 < row["mfu"] < 1
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert [row["step"] for row in lines(run / "evaluations.jsonl")] == [6, 12]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "sample.txt").read_text().startswith("def f0(x)")
    rungs = json.loads((run / "ladder.json").read_text())
    assert rungs["measured"]["step_s"] > rungs["counted"]["bracket_s"][0] > rungs["napkin"]["step_s"] > 0
    (attempt,) = lines(run / "attempts.jsonl")
    assert attempt["versions"]["jax"] and attempt["devices"]
    assert attempt["layers"].keys() == {"scan_layers", "reason"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_resolved_configuration_trains_the_same_model(run, tmp_path):
    assert main(["train", str(run / "config.toml"), "--out", str(tmp_path / "again")]) == 0
    losses = [[row["loss"] for row in lines(folder / "metrics.jsonl")] for folder in (run, tmp_path / "again")]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_eval_measures_the_held_out_text(run, capsys):
    measured = json.loads(printed(capsys, "eval", run, "--json"))
    last = lines(run / "evaluations.jsonl")[-1]
    assert measured["tokens"] == last["tokens"]
    assert measured["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert measured["perplexity"] == pytest.approx(math.exp(measured["loss"]))
    size = json.loads((run / "data.json").read_text())["held_out_bytes"]
    assert measured["bits_per_byte"] == pytest.approx(measured["loss"] * measured["tokens"] / math.log(2) / size)


@pytest.mark.slow
def test_a_checkpoint_that_goes_while_it_is_read_is_chosen_again(run, monkeypatch, capsys):
    """As beside a run that trains on."""
    plain, asked = checkpoints.restore_parameters, []

    def restore(directory, step, *rest, **options):
        asked.append(step)
        if len(asked) < goes_until:
            raise checkpoints.Gone("it was removed")
        return plain(directory, step, *rest, **options)

    monkeypatch.setattr(checkpoints, "restore_parameters", restore)
    goes_until = 3
    assert main(["eval", str(run)]) == 0 and len(asked) == 3
    goes_until = 99
    capsys.readouterr()
    assert main(["eval", str(run)]) == 1 and capsys.readouterr().err == "jaxlm: it was removed\n"


@pytest.mark.slow
def test_checkpoints_are_compared_by_the_same_rows(run):
    """At the end all of the held-out text is measured, before it two batches; what decides is always of these."""
    first, last = lines(run / "evaluations.jsonl")
    assert first["tokens"] < last["tokens"]
    of_first, of_last = (
        json.loads((run / "checkpoints" / str(step) / "metrics" / "metrics").read_text())["held_out_loss"]
        for step in (6, 12)
    )
    assert of_first == first["loss"] and of_last != last["loss"] == pytest.approx(of_last, rel=0.05)


@pytest.mark.slow
def test_the_average_of_the_weights_is_measured_in_the_run_and_by_eval(run, capsys):
    measured = json.loads(printed(capsys, "eval", run, "--ema", "--json"))
    last = lines(run / "evaluations.jsonl")[-1]
    assert measured["loss"] == pytest.approx(last["ema_loss"], rel=1e-6) and last["ema_loss"] != last["loss"]


@pytest.mark.slow
def test_eval_measures_other_text_on_a_mesh(run, text, capsys):
    meshes = [], ["mesh.fsdp=2", "mesh.tensor=2"]
    one, four = (json.loads(printed(capsys, "eval", run, "--data", text / "0.py", *mesh, "--json")) for mesh in meshes)
    assert four["tokens"] == one["tokens"] and four["loss"] == pytest.approx(one["loss"], rel=1e-5)


def completion(*command):
    """The continuation of the one prompt of a `jaxlm generate`."""
    return json.loads(jaxlm(*command, "--json").stdout)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_generate_continues_a_prompt_and_repeats(run):
    def generate(*options):
        return completion("generate", run, "--prompt", "def f", "--max-tokens", 8, *options)

    first = generate("--seed", 1, "--temperature", 0.9, "--top-k", 20, "--top-p", 0.9)
    assert set(first) == {"prompt", "text", "token_ids", "finish_reason"} and 0 < len(first["token_ids"]) <= 8
    assert first == generate("--seed", 1, "--temperature", 0.9, "--top-k", 20, "--top-p", 0.9)
    assert generate("--temperature", 0) == generate("--top-k", 1, "--seed", 3)
    assert generate("--temperature", 0, "--ema")["token_ids"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_leaves_the_parameters_as_they_are_may_change(run):
    """A shorter context too, which --max-tokens ends before unless it is given."""
    asked = ("generate", run, "--token-ids", "1,2,3", "model.context_length=64", "execution.kernels=auto")
    assert 0 < len(completion(*asked)["token_ids"]) <= 62


@pytest.mark.slow
def test_generate_for_a_person_is_prompt_and_text(run, capsys):
    asked = ("generate", run, "--prompt", "def f", "--max-tokens", 8, "--temperature", 0, "--slots", 1)
    assert printed(capsys, *asked) == "def f" + json.loads(printed(capsys, *asked, "--json"))["text"] + "\n"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_generate_from_token_ids_without_a_tokenizer(run, tmp_path):
    (tmp_path / "bare").mkdir()
    for name in ("config.toml", "checkpoints"):
        (tmp_path / "bare" / name).symlink_to(run / name)
    asked = ("--token-ids", "1,2,3", "--max-tokens", 4, "--temperature", 0)
    bare = completion("generate", tmp_path / "bare", *asked)
    assert bare["text"] is None and len(bare["token_ids"]) == 4
    refused = jaxlm("generate", tmp_path / "bare", "--prompt", "def", status=2)
    assert "--token-ids" in refused.stderr and len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_mixture_of_experts_trains_and_names_its_terms(text, tmp_path, capsys):
    """Its one layer has 8 experts of 3 · 64 · 96 parameters, of which each token chooses 2."""
    asked = [
        "train", str(CONFIGS / "experts.toml"), *SMALL, f"data.text={text}", "data.held_out=0.3", "training.steps=5",
        "--out", str(tmp_path / "run"), "mesh.fsdp=1", "records.sample_tokens=0", "evaluation.every=5",
    ]  # fmt: skip
    assert main(asked) == 0
    total, active = re.search(r"([\d,]+) parameters, of which ([\d,]+) are active", capsys.readouterr().err).groups()
    assert int(total.replace(",", "")) - int(active.replace(",", "")) == 6 * 3 * 64 * 96
    last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 0.01 < last["balance_loss"] < 0.02 and 0 < last["router_z_loss"] < last["loss"]
    assert 1 <= last["expert_load"] <= 8 / 2 and 0 < last["router_entropy"] <= math.log(8)


@pytest.mark.slow
def test_a_loss_that_stays_infinite_stops_the_run(text, tmp_path, capsys):
    asked = [
        "train", str(CONFIGS / "quickstart.toml"), *SMALL, f"data.text={text}", "data.held_out=0.3",
        "--out", str(tmp_path / "run"), "model.initializer_std=1e30", "training.max_skipped_in_a_row=3", "mesh.fsdp=1",
    ]  # fmt: skip
    assert main(asked) == 1
    error = capsys.readouterr().err
    assert "steps 1 to 3 was not finite" in error.splitlines()[-1] and "Traceback" not in error


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_held_out_loss_that_is_not_finite_is_said(text, tmp_path):
    ended = jaxlm(
        "train", CONFIGS / "quickstart.toml", *SMALL, f"data.text={text}", "data.held_out=0.3", "training.steps=2",
        "--out", tmp_path / "run", "optimizer.learning_rate=1e38", "optimizer.weight_decay=1000",
        "optimizer.schedule.warmup_steps=0",
    )  # fmt: skip
    assert ended.stdout.splitlines()[-2] == f"{tmp_path / 'run'}: 2 steps, held-out loss not finite"
    assert "[no token can be drawn: the model's logits are not finite]" in (tmp_path / "run/sample.txt").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_cpu_becomes_the_mesh_that_is_asked_for(text, tmp_path):
    code = "import sys; from jaxlm.cli import main; sys.exit(main())"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    ended = subprocess.run(
        [sys.executable, "-c", code, "train", CONFIGS / "quickstart.toml", *SMALL, f"data.text={text}",
         "data.held_out=0.3", "--out", tmp_path / "run", "mesh.data=2", "mesh.tensor=2"],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "4 emulated CPU devices: data 2 × tensor 2" in ended.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_mixture_reports_each_source(tmp_path):
    """Trained from two sources of different formats; eval measures again what the run recorded last."""
    records = [json.dumps({"body": f"page {i} of the web, " + "word " * (i % 9)}) for i in range(120)]
    (tmp_path / "web.jsonl").write_text("\n".join([*records, "broken"]))
    (tmp_path / "code").mkdir()
    for i in range(40):
        (tmp_path / "code" / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 5)
    config = (CONFIGS / "quickstart.toml").read_text().replace('text = "stdlib"\n', "")
    (tmp_path / "mixed.toml").write_text(
        f"""{config}
[data.sources.web]
text = "{tmp_path}/web.jsonl"
field = "body"
weight = 3
[data.sources.code]
text = "{tmp_path}/code"
"""
    )
    options = ("data.held_out=0.3", "data.max_broken=0.01", "--out", tmp_path / "run", "--json")
    ended = jaxlm("train", tmp_path / "mixed.toml", *SMALL, *options)
    assert f"skipped: {tmp_path}/web.jsonl:121 is not JSON" in ended.stderr
    rows = lines(tmp_path / "run" / "evaluations.jsonl")
    for row in rows:
        assert {"step", "loss", "tokens", "bits_per_byte"} < row.keys()
        assert list(row["sources"]) == ["web", "code"]
        losses = [source["loss"] for source in row["sources"].values()]
        assert min(losses) < row["loss"] < max(losses)
    measured = json.loads(jaxlm("eval", tmp_path / "run", "--json").stdout)
    assert measured["bits_per_byte"] == pytest.approx(rows[-1]["bits_per_byte"], rel=1e-6)
    for name, source in measured["sources"].items():
        assert source == pytest.approx(rows[-1]["sources"][name], rel=1e-6)
    shown = jaxlm("eval", tmp_path / "run").stdout.splitlines()
    assert [line.partition(":")[0] for line in shown[1:]] == ["web", "code"]
    other = jaxlm("eval", tmp_path / "run", "--data", tmp_path / "code" / "0.py", "--json")
    assert "sources" not in json.loads(other.stdout)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_in_a_locale_of_ascii_alone(tmp_path):
    """Terminal, sample and records hold text that the locale lacks; what is printed is replaced."""
    folder = tmp_path / "text"
    folder.mkdir()
    config = runs.write_config(folder, "training.steps=4", "records.sample_tokens=24")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"{i} naïve “ü” 😀 " * 99, encoding="utf-8")
    for asked in (("train", config, "--out", tmp_path / "run"), ("eval", tmp_path / "run")):
        command = [sys.executable, "-m", "jaxlm", *map(str, asked)]
        environment = {**runs.environment(1), "PYTHONUTF8": "0", "LC_ALL": "C"}
        ended = subprocess.run(command, capture_output=True, env=environment, timeout=300)
        assert ended.returncode == 0 and ended.stdout.isascii() and ended.stderr.isascii(), ended.stderr
    assert "na" in (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")
