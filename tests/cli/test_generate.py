"""`jaxlm generate`, called here on a model that is not trained."""

import json
import subprocess
import sys

import jax
import meshes
import numpy as np
import pytest
import runs
import tokenizer_fixtures

from jaxlm import job
from jaxlm.cli import main
from jaxlm.config import load
from jaxlm.data.dataset import prepare
from jaxlm.inference import generate
from jaxlm.models import tree
from jaxlm.training import checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.untrained(tmp_path_factory.mktemp("generate") / "run", "training.dtype=bfloat16")


def generated(capsys, run, *arguments):
    assert main(["generate", str(run), *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_no_parameter_lies_in_float32_while_tokens_are_drawn(run, monkeypatch, capsys):
    before = {id(array) for array in jax.live_arrays()}
    largest = []

    def watched(*arguments, **options):
        for tokens in original(*arguments, **options):
            new = [array for array in jax.live_arrays() if id(array) not in before]
            largest.append(max((array.size for array in new if array.dtype == "float32"), default=0))
            assert sum(array.size for array in new if array.dtype == "bfloat16") > 10_000
            yield tokens

    original = generate.generate
    monkeypatch.setattr(generate, "generate", watched)
    generated(capsys, run, "--token-ids", "1,2,3", "--max-tokens", 3)
    assert len(largest) == 3 and max(largest) < 1000


def test_what_is_drawn_goes_on_from_the_prompt(tmp_path, monkeypatch, capsys):
    """Its first blank stays, and a character of several tokens is shown whole."""
    tokenizer = tokenizer_fixtures.llama2()
    run = runs.untrained(tmp_path / "run", "model.vocab_size=296", tokenizer=tokenizer)
    prompt = tokenizer.encode("the model")
    following = tokenizer.encode("the model goes on 😀 here")[len(prompt) :]
    monkeypatch.setattr(generate, "generate", lambda *_, **__: (np.array([token]) for token in following))
    assert generated(capsys, run, "--prompt", "the model") == {"text": " goes on 😀 here", "token_ids": following}
    assert main(["generate", str(run), "--prompt", "the model"]) == 0
    assert capsys.readouterr().out == "the model goes on 😀 here\n"
    assert main(["generate", str(run), "--token-ids", ",".join(map(str, prompt))]) == 0
    assert capsys.readouterr().out == " goes on 😀 here\n"


@pytest.mark.parametrize("asked", [["--json"], ["--temperature", "0"]])
def test_logits_that_are_not_finite_are_one_line(run, monkeypatch, capsys, asked):
    restore = checkpoints.restore_parameters
    broken = lambda *given, **how: jax.tree.map(lambda x: x * np.nan, restore(*given, **how))  # noqa: E731
    monkeypatch.setattr(checkpoints, "restore_parameters", broken)
    assert main(["generate", str(run), "--token-ids", "1,2", *asked]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("jaxlm: the model's logits are not finite")


@pytest.mark.parametrize("context", [1, 32])
def test_a_sample_shows_where_its_prompt_ends(context, tmp_path):
    experiment = load(runs.write_config(tmp_path, f"model.context_length={context}"))
    data, mesh = prepare(experiment.data, experiment.model.vocab_size), meshes.make()
    sample = job._sample(experiment, data, tree.init(experiment.model, 0, mesh), mesh)
    prompt, mark, _ = sample.partition("[prompt ends]")
    assert mark and bool(prompt) == (context > 1)  # a document begins with a separator


def test_as_many_tokens_follow_as_the_context_holds(run, capsys):
    for given, follow in ((6, 27), (32, 1)):
        asked = "--token-ids", ",".join(["1"] * given), "--temperature", 0
        assert 0 < len(generated(capsys, run, *asked)["token_ids"]) <= follow
        assert main(["generate", str(run), *map(str, asked), "--max-tokens", str(follow + 1)]) == 2
        assert f"at most {follow} tokens can follow" in capsys.readouterr().err


def test_a_batch_that_the_mesh_does_not_divide_is_no_matter(run, capsys):
    """Nothing is trained: one prompt is drawn from, and a loss is that of one device, whatever the batch was."""
    written = run / "config.toml"
    whole = written.read_text()
    try:
        written.write_text(whole.replace("batch = 8", "batch = 3"))
        assert generated(capsys, run, "--token-ids", "1,2", "--max-tokens", 1)["token_ids"]
        assert generated(capsys, run, "--token-ids", "1,2", "--max-tokens", 1, "mesh.data=2")["token_ids"]
        losses = []
        for mesh in ("mesh.fsdp=8", "mesh.fsdp=1"):
            assert main(["eval", str(run), "--data", str(run / "0.txt"), "--json", mesh]) == 0
            losses.append(json.loads(capsys.readouterr().out)["loss"])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    finally:
        written.write_text(whole)


@pytest.mark.slow
def test_ascii_alone_is_no_obstacle(run, capsys):
    """The prompt is read as UTF-8, and what the terminal lacks is replaced."""
    environment = {**runs.environment(), "PYTHONUTF8": "0", "LC_ALL": "C"}
    asked = ["--prompt", "é", "--max-tokens", "2", "--temperature", "0"]
    command = [part.encode() for part in (sys.executable, "-m", "jaxlm", "generate", str(run), *asked)]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"é{generated(capsys, run, *asked)['text']}\n".encode("ascii", "replace")
