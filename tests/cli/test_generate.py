"""`jaxlm generate`, called here on a model that is not trained."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from functools import partial

import jax
import meshes
import numpy as np
import pytest
import runs
import tokenizer_fixtures
from engine_fixtures import WrittenEngine

from jaxlm import api
from jaxlm.cli import main
from jaxlm.config import load
from jaxlm.core.errors import InputError
from jaxlm.data.dataset import prepare
from jaxlm.inference.engine import Engine
from jaxlm.inference.settings import EngineSettings
from jaxlm.models import tree
from jaxlm.runs import sample
from jaxlm.training import checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.untrained(tmp_path_factory.mktemp("generate") / "run", "execution.dtype=bfloat16", "model.num_layers=1")


def completions(capsys, run, *arguments):
    return generated(capsys, run, *arguments)["completions"]


def generated(capsys, run, *arguments):
    assert main(["generate", str(run), *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.exhaustive
def test_no_parameter_lies_in_float32_while_tokens_are_drawn(run, monkeypatch, capsys):
    """Nor twice in bfloat16: the engine has a form of its own. Pages alone are in float32 on a CPU."""
    before = {id(array) for array in jax.live_arrays()}
    new = []

    def watched(engine):
        new.append([array for array in jax.live_arrays() if id(array) not in before])
        return step(engine)

    step = Engine.step
    monkeypatch.setattr(Engine, "step", watched)
    model = api.load(run)
    pages = sum(array.size for array in jax.tree.leaves(model.engine().runner._pages))
    weights = sum(leaf.size for leaf in jax.tree.leaves(model.parameters))
    del model
    before.update(id(array) for array in jax.live_arrays())
    generated(capsys, run, "--token-ids", "1,2,3", "--max-tokens", 3)
    assert len(new) >= 3
    for arrays in new:
        rounded, wide = (sum(x.size for x in arrays if x.dtype == dtype) for dtype in ("bfloat16", "float32"))
        assert rounded == weights and wide < pages + 100_000


def test_what_is_drawn_goes_on_from_the_prompt(tmp_path, monkeypatch, capsys):
    """Its first blank stays, and a character of several tokens is shown whole."""
    tokenizer = tokenizer_fixtures.llama2()
    run = runs.untrained(tmp_path / "run", "model.num_layers=1", "model.vocab_size=296", tokenizer=tokenizer)
    prompt = tokenizer.encode("the model")
    following = tokenizer.encode("the model goes on 😀 here")[len(prompt) :]
    engine = WrittenEngine(lambda _: following)
    monkeypatch.setattr(api.LoadedModel, "engine", lambda *_: engine)
    rest = {"text": " goes on 😀 here", "token_ids": following, "finish_reason": "length", "dtype": "float32"}
    assert generated(capsys, run, "--prompt", "the model") == {"prompt": "the model", **rest}
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


@pytest.mark.parametrize("context", [pytest.param(1, marks=pytest.mark.exhaustive), 32])
def test_a_sample_shows_where_its_prompt_ends(context, tmp_path):
    changes = "model.num_layers=1", f"model.context_length={context}", "records.sample_tokens=40"
    experiment = load(runs.write_config(tmp_path, *changes))
    data, mesh = prepare(experiment.data, experiment.model.vocab_size), meshes.make()
    text = sample.sample(experiment, data, tree.init(experiment.model, 0, mesh), mesh)
    prompt, mark, _ = text.partition("[prompt ends]")
    assert mark and bool(prompt) == (context > 1)  # a document begins with a separator


def test_as_many_tokens_follow_as_the_context_holds(run, capsys):
    for given, follow in ((6, 27), (32, 1)):
        asked = "--token-ids", ",".join(["1"] * given), "--temperature", 0
        assert 0 < len(generated(capsys, run, *asked)["token_ids"]) <= follow
        assert main(["generate", str(run), *map(str, asked), "--max-tokens", str(follow + 1)]) == 2
        assert f"at most {follow} tokens can follow" in capsys.readouterr().err


@pytest.mark.exhaustive
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


PROMPTS = ["alpha", "beta gamma", "é"]
ASKED = ["--max-tokens", 6, "--num-samples", 2, "--slots", 2]


def test_prompts_come_from_options_files_and_standard_input(run, tmp_path, monkeypatch, capsys):
    """The continuations are the same, in the order of the prompts, and those of one alone."""
    texts, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    texts.write_bytes("".join(f"{prompt}\r\n" for prompt in PROMPTS).encode())
    digits = "9" * 5000  # of a number that nobody asked for
    records.write_text("".join(f'{{"id": {digits}, "prompt": {json.dumps(prompt)}}}\n' for prompt in PROMPTS))
    given = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    expected = completions(capsys, run, *ASKED, *given)
    assert [found["prompt"] for found in expected] == [prompt for prompt in PROMPTS for _ in range(2)]
    assert expected[:2] == completions(capsys, run, *ASKED, "--prompt", PROMPTS[0])
    assert completions(capsys, run, *ASKED, "--prompts", texts) == expected
    assert completions(capsys, run, *ASKED, "--prompts", records) == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(texts.read_bytes())))
    assert completions(capsys, run, *ASKED, "--prompts", "-") == expected
    ids = [part for prompt in PROMPTS for part in ("--token-ids", ",".join(map(str, [256, *prompt.encode()])))]
    alike = completions(capsys, run, *ASKED, *ids, "--slots", 1)
    assert [found["text"] for found in alike] == [found["text"] for found in expected]


@pytest.mark.exhaustive
def test_several_texts_have_a_line_each(run, capsys):
    given = [part for prompt in PROMPTS[:2] for part in ("--prompt", prompt)]
    drawn = iter(completions(capsys, run, *ASKED, *given))
    assert main(["generate", str(run), *map(str, ASKED), *given]) == 0
    expected = ""
    for number, prompt in enumerate(PROMPTS[:2], 1):
        for drawing in (1, 2):
            expected += f"--- prompt {number}, sample {drawing} ---\n{prompt}{next(drawn)['text']}\n"
    assert capsys.readouterr().out == expected


def test_a_stop_string_ends_a_text_before_it(run, capsys):
    asked = "--prompt", "alpha", "--max-tokens", 20, "--temperature", 0
    whole = generated(capsys, run, *asked)
    stop = whole["text"][7:9]
    cut = generated(capsys, run, *asked, "--stop", "never in it", "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)] and cut["finish_reason"] == "stop"
    assert whole["finish_reason"] == "length" and len(cut["token_ids"]) < 20


def test_a_text_has_the_form_that_is_asked_for(run, tmp_path, capsys):
    asked = "--prompt", "alpha", "--max-tokens", 20, "--seed", 3
    text = generated(capsys, run, *asked, "--regex", "[xy]{3}(z|w)")
    assert re.fullmatch("[xy]{3}(z|w)", text["text"]) and text["finish_reason"] == "stop"
    (tmp_path / "form.json").write_text('{"enum": ["so", "it"]}')
    text = generated(capsys, run, *asked, "--json-schema", tmp_path / "form.json")
    assert json.loads(text["text"]) in ("so", "it") and text["finish_reason"] == "stop"
    assert generated(capsys, run, *asked, "--json-schema", ' {"enum": ["so", "it"]}') == text
    model = api.load(run)
    for form in ({"enum": ["so", "it"]}, '{"enum": ["so", "it"]}'):
        (drawn,) = model.generate(["alpha"], 20, seed=3, json_schema=form)
        assert drawn.text == text["text"]
    model = api.load(run)
    with pytest.raises(InputError, match="there is no look-around"):
        model.generate(["alpha"], regex="(?=a)b")
    assert "_restored" not in vars(model), "the weights are read for nothing"
    with pytest.raises(InputError, match="json_schema and regex are both"):
        model.generate(["alpha"], json_schema={}, regex="a")
    with pytest.raises(InputError, match="json_schema is no JSON: Object of type set"):
        model.generate(["alpha"], json_schema={"enum": {1}})
    message = {"role": "user", "content": "alpha"}
    for prompt in ("alpha", [1, 2], np.array([1, 2]), message, [message]):
        with pytest.raises(InputError, match="prompts is a single prompt"):
            model.generate(prompt)
    with pytest.raises(InputError, match=r"to be a list of strings: \['END'\]"):
        model.generate(["alpha"], stop="END")
    for call, name in (
        (partial(api.configure, "quickstart"), "overrides"),
        (partial(api.load, run), "overrides"),
        (api.compare, "runs"),
    ):
        with pytest.raises(InputError, match=rf"^{name} = 'a=1' is a single string"):
            call("a=1")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--prompts", "FOLDER/none.txt"], "none.txt cannot be read: No such file or directory"),
        (["--prompts", "FOLDER/empty.txt"], "empty.txt is empty; give at least one prompt"),
        (["--prompts", "FOLDER/odd.jsonl"], 'odd.jsonl:2 is no record such as {"prompt": "a text"}'),
        (["--prompts", "FOLDER/latin.txt"], "latin.txt is not UTF-8; convert it"),
        (["--token-ids", "1", "--token-ids", "2,300"], "prompt 2: token id 300 is outside the vocabulary, 0 to 256"),
        (["--prompt", "a", "--num-samples", "0"], "--num-samples 0 must be from 1 to 65,535"),
        (["--prompt", "a", "--stop", ""], "--stop '' would end every text"),
        (["--prompt", "a", "--seed", str(2**63)], "--seed 9223372036854775808 must be from -9223372036854775808 to"),
        (["--prompt", "a", "--token-ids", "1"], "not allowed with argument"),
        (
            ["--prompt", "a", "--regex", "("],
            "the regular expression cannot be used: at character 1 of '(': the ( has no )",
        ),
        (["--prompt", "a", "--json-schema", "FOLDER/none"], "none: there is no such file, and it is no schema such as"),
        (
            ["--prompt", "a", "--json-schema", "FOLDER/odd.jsonl"],
            "odd.jsonl is no JSON: extra data at line 2, column 1",
        ),
        (["--prompt", "a", "--json-schema", "f", "--regex", "a"], "not allowed with argument"),
        (["--prompt", "a", "--speculate", "ngrams:2"], "; ngram:2 looks drafts up in the text"),
        (["--regex", "[a"], "the [ has no ]; close it"),  # before a prompt is read
        (["--json"], "--json is of prompts that are given: add --prompt, --prompts or --token-ids"),
    ],
)
def test_what_cannot_be_continued_is_one_line(run, tmp_path, capsys, asked, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "odd.jsonl").write_text('{"prompt": "alpha"}\n{"text": "beta"}\n')
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert main(["generate", str(run), *(part.replace("FOLDER", str(tmp_path)) for part in asked)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_without_a_prompt_each_line_is_continued_as_it_is_read(run, monkeypatch, capsys):
    """One that is too long is said, and takes no other down; a line again has other random numbers."""
    lines = ["alpha\n", "x" * 40 + "\n", "beta\n", "alpha"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("".join(lines).encode())))
    assert main(["generate", str(run), "--max-tokens", "6"]) == 0
    out, error = capsys.readouterr()
    first, second, third = (
        generated(capsys, run, "--max-tokens", 6, "--prompt", p) for p in ("alpha", "beta", "alpha")
    )
    assert out.startswith(f"alpha{first['text']}\nbeta") and out.count("\n") >= 3
    assert out.count("alpha") == 2 and not out.endswith(f"alpha{third['text']}\n")
    assert error == "jaxlm: a prompt of 41 tokens exceeds model.context_length = 32; shorten it\n"


@pytest.mark.slow
def test_a_terminal_is_asked_for_prompts_until_its_end(run):
    """Ctrl-C ends the text that is drawn, and nothing else."""
    controller, terminal = pty.openpty()
    # With the programs of this process.
    environment = {**runs.environment(8), "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    command = [sys.executable, "-m", "jaxlm", "generate", str(run), "--max-tokens", "5", "--temperature", "0"]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    )
    os.close(terminal)
    try:
        seen = _read_until(controller, "> ")
        os.write(controller, b"alpha\n")
        seen = _read_until(controller, "\n> ")
        assert seen.count("alpha") == 2  # as typed, and before its continuation
        os.write(controller, b"\x04")
        _read_until(controller, None)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def _read_until(terminal, end):
    """Read what a terminal shows until a text, or until its program has left."""
    seen = ""
    while end is None or end not in seen:
        try:
            seen += os.read(terminal, 4096).decode()
        except OSError:  # how Linux reports that the other side is closed
            assert end is None, seen
            break
    return seen.replace("\r\n", "\n")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ascii_alone_is_no_obstacle(run, capsys):
    """The prompt is read as UTF-8, and what the terminal lacks is replaced."""
    environment = {**runs.environment(), "PYTHONUTF8": "0", "LC_ALL": "C"}
    asked = ["--prompt", "é", "--max-tokens", "2", "--temperature", "0"]
    command = [part.encode() for part in (sys.executable, "-m", "jaxlm", "generate", str(run), *asked)]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"é{generated(capsys, run, *asked)['text']}\n".encode("ascii", "replace")


def test_the_engine_is_as_it_is_asked_to_be(run, monkeypatch, capsys):
    made = []

    def watched(model, settings):
        made.append((settings, jax.tree.leaves(model.parameters)[0].dtype))
        return WrittenEngine(lambda _: [65])

    monkeypatch.setattr(api.LoadedModel, "_new_engine", watched)
    monkeypatch.setattr("jaxlm.inference.dtype_choice.seconds_of", {"float32": 0.002, "bfloat16": 0.001}.get)
    asked = ["generate", str(run), "--prompt", "a", "--max-tokens", "1"]
    assert main([*asked, "--slots", "3", "--max-context", "20", "--cache-memory", "1.5MiB", "--fast"]) == 0
    assert main([*asked, "--dtype", "float32"]) == 0
    assert main([*asked, "--dtype", "auto"]) == 0
    assert "computing in bfloat16, as measured: 2 rows by 2048 × 8192 take 2.0 ms in float32" in capsys.readouterr().err
    given = EngineSettings(slots=3, context=20, cache_bytes=3 * 2**19, exact=False)
    assert made == [(given, "bfloat16"), (EngineSettings(), "float32"), (EngineSettings(), "bfloat16")]


def test_states_of_recurrent_layers_stay_as_often_as_asked(tmp_path, monkeypatch):
    run, made = runs.untrained(tmp_path / "run", "model.attention.kind=short_convolution", "model.num_layers=1"), []
    monkeypatch.setattr(
        api.LoadedModel, "_new_engine", lambda _, settings: made.append(settings) or WrittenEngine(lambda _: [65])
    )
    asked = ["generate", str(run), "--prompt", "a", "--max-tokens", "1"]
    assert main([*asked, "inference.page=32", "inference.state_interval=64"]) == 0
    assert [settings.states_every for settings in made] == [64]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--cache-memory", "2 bits"], "'2 bits' must be a size such as 512MiB or 2GiB"),
        (["--slots", "0"], "'0' must be a whole number from 1 on"),
        (["--cache-memory", "1KiB", "--max-context", "32"], "a cache of 1 KiB does not hold one sequence of 32 tokens"),
        (["--max-context", "2", "--token-ids", "1,2,3"], "at most 2"),
        (["--max-context", "999999"], "inference.context = 999999 is longer than model.context_length = "),
    ],
)
def test_an_engine_that_cannot_be_is_one_line(run, capsys, asked, message):
    prompt = [] if "--token-ids" in asked else ["--prompt", "a"]
    assert main(["generate", str(run), *prompt, "--max-tokens", "1", *asked]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1
