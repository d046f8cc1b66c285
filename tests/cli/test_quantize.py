"""Quantised weights from the command line: at load, kept as a run, planned, and under adapters."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import runs
from story_fixtures import STORIES, shallow

from jaxlm import api
from jaxlm.cli import main
from jaxlm.models import tree

STORY = (STORIES / "expected.txt").read_text()
ON_ONE = ["execution.dtype=float32", "mesh.fsdp=1"]


def printed(capsys, *arguments):
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of two layers, a text, and the model kept in int8."""
    folder = tmp_path_factory.mktemp("quantized")
    shallow(folder / "model", layers=2)
    (folder / "text.txt").write_text(STORY)
    return folder


@pytest.fixture(scope="module")
def kept(folder):
    asked = "quantize", folder / "model", folder / "kept", "--to", "int8", "--data", folder / "text.txt", "--json"
    assert main(list(map(str, asked))) == 0
    return folder / "kept"


def test_what_is_kept_has_the_bits_of_what_is_quantised_at_load(folder, kept):
    there, here = api.load(kept, ON_ONE), api.load(folder / "model", ["execution.quantize=int8", *ON_ONE])
    jax.tree.map(np.testing.assert_array_equal, there.parameters, here.parameters)
    narrow = {path.rpartition("/")[2] for path, x in tree.paths(there.parameters).items() if x.dtype == np.int8}
    assert narrow == {"values"}


def test_a_quantised_model_continues_texts_and_is_measured(folder, kept, capsys):
    """As at load, with a perplexity that is near to the model's own, but another."""
    asked = "--prompt", "Once upon", "--max-tokens", 12, "--temperature", 0, "--slots", 1, "--max-context", 64, *ON_ONE
    told = printed(capsys, "generate", kept, *asked)
    assert told["token_ids"] == printed(capsys, "generate", folder / "model", "--quantize", "int8", *asked)["token_ids"]
    measure = "--data", folder / "text.txt", *ON_ONE
    whole, narrow = (printed(capsys, "eval", folder / name, *measure)["perplexity"] for name in ("model", "kept"))
    assert whole != narrow == pytest.approx(whole, rel=0.02)


def test_what_would_change_a_kept_form_is_refused(folder, kept, tmp_path, capsys):
    prompt = "--prompt", "Once"
    assert f"{kept} is kept in int8, and cannot be rounded to fp8; take the model that was quantised" in refused(
        capsys, "generate", kept, "--quantize", "fp8", *prompt
    )
    widened = refused(capsys, "export", kept, tmp_path / "exported")
    assert widened.endswith(f"{kept} is kept in int8, and cannot be widened; take the model that was quantised")
    both = refused(capsys, "generate", kept, "--quantize", "int8", "execution.quantize=int8", *prompt)
    assert "--quantize and execution.quantize are one setting; give one of them" in both
    assert "--group is not of w8a8" in refused(
        capsys, "quantize", kept, tmp_path / "new", "--to", "w8a8", "--group", 32, "--data", folder / "text.txt"
    )


def test_a_plan_of_decoding_reads_what_is_kept(capsys):
    """Llama 3.2 1B: 973 million numbers of layers in 1 byte, with a float32 scale for each output."""
    asked = "plan", "llama3.2-1b", "--on", "h200-sxm:1", "--workload", "decode", "inference.sequences=1"
    plain, narrow = (printed(capsys, *asked, "--quantize", form) for form in ("none", "int8"))
    sizes = [each["memory_bytes_per_device"]["parameters"] for each in (plain, narrow)]
    assert sizes[0] - sizes[1] == 973_078_528 - 4 * 16 * (2048 + 512 + 512 + 2048 + 2 * 8192 + 2048)
    assert plain["parameters"] == narrow["parameters"] and plain["flops"] == narrow["flops"]
    times = [each["time_s"]["lower_bound"] for each in (plain, narrow)]
    assert times[0] - times[1] == pytest.approx((sizes[0] - sizes[1]) / 4.8e12, rel=1e-3)


def test_whole_training_is_refused(tmp_path, capsys):
    asked = "plan", "llama3.2-1b", "--on", "h200-sxm:8", "--quantize", "int8"
    assert 'execution.quantize = "int8" is of weights that are not trained: add [lora]' in refused(capsys, *asked)
    with_adapters = *asked[:-1], "w8a8", "lora.rank=4"
    assert 'train adapters beside the same weights with "int8"' in refused(capsys, *with_adapters)


@pytest.mark.slow
def test_adapters_are_trained_beside_quantised_weights(folder, tmp_path, capsys):
    """A run is the sum of the rounded base and its adapters, and rounded again only where that is asked for."""
    config = Path(tmp_path / "lora.toml")
    config.write_text(f"""
[model]
base = "{folder / "model"}"
[data]
text = "{folder / "text.txt"}"
tokenizer = "{STORIES / "tokenizer.json"}"
held_out = 0.3
[execution]
dtype = "float32"
quantize = "int8"
[training]
steps = 4
batch = 4
sequence = 32
log_every = 1
[optimizer]
learning_rate = 3e-3
[records]
tensorboard = false
sample_tokens = 4
[lora]
rank = 4
[mesh]
fsdp = 1
""")
    losses = {}
    for form in ("int8", "none"):
        out = tmp_path / form
        train = "train", config, "--from", folder / "model", "--out", out, f"execution.quantize={form}"
        assert main(list(map(str, train))) == 0
        losses[form] = runs.losses(out)[1]
    assert losses["int8"] != losses["none"] == pytest.approx(losses["int8"], rel=0.01)
    measure = "--data", folder / "text.txt", *ON_ONE
    sums, again = (
        printed(capsys, "eval", tmp_path / "int8", *each, *measure)["loss"] for each in ([], ["--quantize=int8"])
    )
    assert sums != again == pytest.approx(sums, rel=0.02)
