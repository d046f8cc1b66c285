"""Published weights from the command line: used where they lie, imported, trained on, and given back."""

import json
import shutil
from pathlib import Path

import jax
import meshes
import numpy as np
import pytest
import runs
import vocabulary_fixtures
from matrices import sampled

from jaxlm import api
from jaxlm.cli import main
from jaxlm.core.errors import InputError
from jaxlm.families import safetensors
from jaxlm.families.directory import PublishedModel
from jaxlm.families.safetensors import LazyTensor
from jaxlm.runs.folder import Run
from jaxlm.runs.locate import needed_by
from jaxlm.runs.published import PublishedSource
from jaxlm.runs.trained import RunSource

PUBLISHED = Path(__file__).parents[1] / "families" / "stories260K"
IDS = json.loads((PUBLISHED / "stories260K_tokens.json").read_text())["tokens"]
STORY = (PUBLISHED / "expected.txt").read_text()
ON_ONE = ["execution.dtype=float32", "mesh.fsdp=1"]
AS_FEW = ["--slots", "1", "--max-context", "256"]  # one engine's programs serve all tests
GREEDY = ["--prompt", "", "--max-tokens", "200", "--temperature", "0", *AS_FEW, *ON_ONE, "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    assert main(["import", str(PUBLISHED), str(folder / "imported")]) == 0
    assert main(["export", str(folder / "imported"), str(folder / "exported")]) == 0
    return folder


@pytest.mark.parametrize("name", sampled([None, "imported", "exported"], ["None", "exported"]))
def test_the_story_is_told_to_the_last_byte(folder, name, capsys):
    """By the published directory, by the run that it is imported to, and by what is exported of that."""
    assert main(["generate", str(PUBLISHED if name is None else folder / name), *GREEDY]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["token_ids"] == IDS[1:201] and told["text"] == STORY and len(STORY.encode()) == 464


def test_an_export_gives_back_what_was_imported(folder):
    there, back = PublishedModel(PUBLISHED), PublishedModel(folder / "exported")
    assert there.stored.keys() == back.stored.keys()
    for name, tensor in there.stored.items():
        assert tensor.dtype == back.stored[name].dtype
        np.testing.assert_array_equal(tensor.read(), back.stored[name].read())
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (folder / "exported" / name).read_bytes() == (PUBLISHED / name).read_bytes()


def test_a_tokenizer_in_another_file_is_converted_and_given_back_as_it_was(tmp_path):
    """No file that says how a text ends is overwritten, and code is not even copied."""
    model, ends = tmp_path / "model", {"eos_token_id": [2, 378], "bos_token_id": 1}
    shutil.copytree(PUBLISHED, model)
    (model / "tokenizer.json").unlink()
    (model / "tokenization_own.py").write_text("raise SystemExit")
    with pytest.raises(InputError, match="has no tokenizer.json, but tokenization_own.py, which is code and"):
        PublishedSource(model).text.load_tokenizer()
    contents = {
        **{"tekken.json": vocabulary_fixtures.tekken_file(), "old.tiktoken": vocabulary_fixtures.tiktoken_file()},
        **{name: json.dumps(table).encode() for name, table in {
            "generation_config.json": ends, "tokenizer_config.json": {"eos_token": "[/INST]"},
            "special_tokens_map.json": {"eos_token": {"content": "[IMG]"}}, "added_tokens.json": {"<more>": 500},
        }.items()},
    }  # fmt: skip
    for name, content in contents.items():
        (model / name).write_bytes(content)
    assert main(["import", str(model), str(tmp_path / "run")]) == 0
    for source in (RunSource(Run(tmp_path / "run")), PublishedSource(model)):
        tokenizer = source.text.load_tokenizer()
        assert (
            tokenizer.begin == (1,)
            and tokenizer.stop_token_ids == {2, 378, 4, 10}
            and tokenizer.encode("<more>") == [500]
        )
        assert tokenizer.valid_token_mask(512).sum() == 426  # of 512 rows
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    files = {file.name: file.read_bytes() for file in (tmp_path / "back").iterdir()}
    assert files.keys() == {*contents, "config.json", "model.safetensors"}
    assert all(files[name] == content for name, content in contents.items())


def test_a_mesh_that_does_not_divide_the_model_is_one_line(tmp_path, capsys):
    (tmp_path / "other.txt").write_text(STORY)
    assert main(["eval", str(PUBLISHED), "--data", str(tmp_path / "other.txt"), "mesh.tensor=8"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "mesh.tensor = 8 does not divide model.feed_forward.d_ff = 172: set" in said


def test_its_loss_is_measured_on_other_text_alone(tmp_path, capsys):
    (tmp_path / "story.txt").write_text(STORY)
    assert main(["eval", str(PUBLISHED), "--data", str(tmp_path / "story.txt"), "mesh.fsdp=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] < 1.5  # nats a token, of its own greedy story
    assert main(["eval", str(PUBLISHED)]) == 2
    assert "is a published model, which has no held-out text; give --data PATH" in capsys.readouterr().err


def test_it_is_planned_from_its_configuration_alone(tmp_path, capsys):
    shutil.copy(PUBLISHED / "config.json", tmp_path)
    assert main(["plan", str(tmp_path), "--on", "tpu-v5e:1x1", "--workload", "decode", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] == 260_032


def test_no_training_continues_in_an_import(folder, capsys):
    assert main(["train", str(folder / "imported"), "--out", str(folder / "imported")]) == 2
    assert f"holds imported weights, in which no training continues; start from them: --from {folder / 'imported'}" in (
        capsys.readouterr().err
    )


def test_arrays_keep_their_dtypes_on_devices_that_do_not_divide_them(tmp_path, monkeypatch):
    """In bfloat16, with one norm in float32, on three devices."""
    meshes.have(monkeypatch, 3)
    there = {name: tensor.read() for name, tensor in PublishedModel(PUBLISHED).stored.items()}
    there = {name: x if name == "model.norm.weight" else x.astype(jax.numpy.bfloat16) for name, x in there.items()}
    tensors = {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in there.items()}
    (tmp_path / "model").mkdir()
    safetensors.write(tmp_path / "model" / "model.safetensors", tensors, {})
    shutil.copy(PUBLISHED / "config.json", tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "run")]) == 0
    held = api.load(tmp_path / "run", dtype="stored").parameters
    assert {str(x.dtype) for x in jax.tree.leaves(held)} == {"bfloat16", "float32"}
    assert held["layers"]["feed_forward"]["up"].dtype == "bfloat16"
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    for name, tensor in PublishedModel(tmp_path / "back").stored.items():
        assert tensor.dtype == there[name].dtype
        np.testing.assert_array_equal(tensor.read(), there[name])


def test_an_import_is_listed_and_has_no_loss_to_compare(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "500")
    shutil.copytree(folder / "imported", tmp_path / "imported")
    assert main(["runs", str(tmp_path)]) == 0
    assert "imported imported llama 0/– 0 – –" in " ".join(capsys.readouterr().out.split())
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["state"], run["family"], run["step"], run["steps"]) == ("imported", "llama", 0, None)
    assert main(["compare", str(tmp_path / "imported"), str(folder / "imported")]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"{tmp_path / 'imported'}, {folder / 'imported'} have none on record\n")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    sentences = STORY.split(". ")
    for number in range(4 * len(sentences)):
        turned = sentences[number % len(sentences) :] + sentences
        (folder / f"{number}.txt").write_text(". ".join(turned[: 4 + number // len(sentences)]))
    path = folder / "tune.toml"
    path.write_text(
        f"""
[data]
text = "{folder}"
held_out = 0.1
[execution]
dtype = "float32"
[training]
steps = 4
batch = 8
sequence = 64
log_every = 1
[optimizer]
learning_rate = 1e-4
[records]
tensorboard = false
sample_tokens = 0
[mesh]
fsdp = 1
"""
    )
    return path


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The published directory with a chat template, and ids of its own that end what is drawn."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(PUBLISHED, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<s>{% endfor %}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 378], "temperature": 0.7}')
    return folder


@pytest.mark.slow
def test_a_run_begins_with_published_weights_and_gives_them_back_trained(chatty, experiment, tmp_path, capsys):
    out = tmp_path / "tuned"
    command = ["train", str(experiment), "--from", str(chatty), "--out", str(out)]

    def said(*arguments, status=0):
        assert main(list(map(str, arguments))) == status
        printed = capsys.readouterr()
        assert "resumed with" not in printed.err
        return printed.err

    assert f"beginning with the weights of {chatty}" in said(*command)
    first = runs.losses(out)[1]
    assert first < 2.5 < np.log(512)  # it knows the story
    run = api.load(out)
    assert run.config == api.load(chatty).config and run.experiment.data.tokenizer == str(out / "tokenizer.json")
    assert run.tokenizer.stop_token_ids == {2, 378} and run.chat_template.stop_token_ids == {1}
    origin = {"source": str(chatty), "kind": "published", "step": None, "revision": None}
    assert json.loads((out / "origin.json").read_text()) == origin

    said("export", out, tmp_path / "given")
    there, back = PublishedModel(chatty), PublishedModel(tmp_path / "given")
    assert back.config == there.config and back.stored.keys() == there.stored.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    change = np.abs(np.asarray(back.stored[name].read()) - there.stored[name].read()).max()
    assert 0 < change < 0.01
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "given" / name).read_bytes() == (chatty / name).read_bytes()

    # It goes on by the same command, and by itself without the source; only its first state needs that.
    recorded, away = runs.rows(out), chatty.rename(tmp_path / "away")
    said("train", out)
    killed = shutil.copytree(out, tmp_path / "killed", ignore=shutil.ignore_patterns("checkpoints", "*.jsonl"))
    why = f"jaxlm: {killed} has no checkpoint yet and begins with {chatty}: there is no run {chatty}; "
    assert said("train", killed, status=2).startswith(why)
    away.rename(chatty)
    assert f"{out} goes on from its checkpoint: --from {chatty} is not used" in said(*command)
    assert str(needed_by(killed)) == str(chatty) and needed_by(out) is None
    assert runs.rows(out) == recorded
    other = said("train", experiment, "--from", PUBLISHED, "--out", out, status=2)
    assert other == (
        f"jaxlm: {out} began with the weights of {chatty}, not with those of {PUBLISHED}; leave out --from, or choose "
        "another --out\n"
    )
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert str(chatty) in {row["begun_from"] for row in json.loads(capsys.readouterr().out)["runs"]}


@pytest.mark.exhaustive  # tests/families/test_reading.py loads them in two processes
def test_two_processes_begin_with_published_weights(folder, experiment):
    """With the loss that one begins with, to what another order of sums makes of it in float32."""
    port, out = runs.free_port(), folder / "by-two"
    places = [("--process", f"{index}/2@127.0.0.1:{port}") for index in range(2)]
    settings = ("training.steps=1", "mesh.tensor=2", "--from", str(PUBLISHED))
    for process in [runs.start(experiment, out, *settings, *place) for place in places]:
        runs.finish(process)
    runs.finish(runs.start(experiment, folder / "by-one", *settings, devices=2))
    assert runs.losses(out)[1] == pytest.approx(runs.losses(folder / "by-one")[1], rel=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layers=3", "has another [model] than the configuration: model.num_layers = 3 and not 5"),
        ("data.tokenizer=bpe", "has a tokenizer of its own, and data.tokenizer is another; leave that out"),
        ("data.tokenizer=bytes", "has a tokenizer of its own, and data.tokenizer is another; leave that out"),
    ],
)
def test_a_run_begins_with_nothing_that_does_not_fit(experiment, tmp_path, capsys, override, message):
    asked = ["train", str(experiment), "--from", str(PUBLISHED), "--out", str(tmp_path / "run"), override]
    assert main(asked) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run" / "config.toml").exists()


def test_the_command_line_goes_before_what_was_published(tmp_path, capsys):
    shutil.copytree(PUBLISHED, tmp_path / "model")
    published = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "eos_token_id": [2, 378]}
    published |= {"repetition_penalty": 1.05, "min_p": 0.0}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(published))
    asked = ["generate", str(tmp_path / "model"), "--prompt", "", "--max-tokens", "9", *AS_FEW, *ON_ONE]
    assert main([*asked, "--temperature", "0", "--repetition-penalty", "1", "--json"]) == 0
    out, error = capsys.readouterr()
    assert error == "jaxlm: top_p = 0.9 of generation_config.json\n"
    told = json.loads(out)
    assert told["token_ids"] == IDS[1:4] and told["finish_reason"] == "stop"  # any of the ids that end a text ends it


def test_a_program_samples_as_the_command_does(tmp_path):
    shutil.copytree(PUBLISHED, tmp_path / "model")
    published = {"do_sample": True, "temperature": 1.0, "top_k": 1, "eos_token_id": [2, 378]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(published))
    model = api.load(tmp_path / "model", [*ON_ONE, "inference.sequences=1", "inference.context=256"])
    (likeliest,) = model.generate([""], 9)
    assert list(likeliest.token_ids) == IDS[1:4]
    (drawn,) = model.generate([""], 9, temperature=9.0, top_k=512)
    assert drawn.token_ids != likeliest.token_ids


def broken(folder, change):
    """A copy of the published directory with a change to it."""
    shutil.copytree(PUBLISHED, folder)
    change(folder)
    return folder


def _cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-9])


def _only_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _escaping(folder):
    (folder / "model.safetensors").unlink()  # which goes before an index
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _lost(folder):
    (folder / "model.safetensors").unlink()  # which goes before an index
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _unknown_ranks(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_bytes(vocabulary_fixtures.tiktoken_file())


def _config(**keys):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, "model.safetensors is cut off: 9 bytes of its tensors are missing"),
        (_only_pickles, "has pytorch_model.bin, which may run code when it is read"),
        (_escaping, "names '../model.safetensors', which is no file in its folder"),
        (_lost, "has no model-00001-of-00002.safetensors, which its index names"),
        (_unknown_ranks, "tiktoken.model: it has 400 tokens of bytes: which pattern splits texts for them is in code"),
        (_config(model_type="rwkv"), "has model_type 'rwkv'; jaxlm reads llama"),
        (_config(num_experts=8), "num_experts: jaxlm knows no such key of llama"),
        (_config(hidden_size=32), "model.embed_tokens.weight is [512, 64], and the configuration says [512, 32]"),
        (_config(num_hidden_layers=6), "model.layers.5.input_layernorm.weight is missing"),
        (_config(tie_word_embeddings=False), "lm_head.weight is missing"),
        (_config(attention_bias=True), "model.layers.0.self_attn.q_proj.bias is missing"),
    ],
)
def test_a_broken_directory_is_one_line(tmp_path, capsys, change, message):
    model = broken(tmp_path / "model", change)
    assert main(["import", str(model), str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.strip().splitlines()[-1].startswith("jaxlm: ")
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_said(tmp_path, capsys):
    def change(folder):
        tensor = PublishedModel(folder).stored["model.norm.weight"]
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(tensor.offset)
            file.write(np.float32(np.nan).tobytes())

    assert main(["import", str(broken(tmp_path / "model", change)), str(tmp_path / "run")]) == 0
    assert "not all numbers are finite in final_norm/scale" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_ours_is_published_with_its_tokenizer(tmp_path, capsys):
    """A model of Llama's parts, and one of GPT-2's, whose tokenizer is that of bytes."""
    llama = ("norm.kind=rms", "position.kind=rope", "feed_forward.activation=silu", "feed_forward.gated=true")
    llama = [f"model.{key}" for key in llama]
    for name, overrides in {"gpt2": ["model.attention.qkv_bias=true"], "llama": llama}.items():
        run, out = runs.untrained(tmp_path / name, "model.num_layers=1", *overrides), tmp_path / f"{name}-hf"
        status = main(["export", str(run), str(out), "--json"])
        said = capsys.readouterr()
        if name == "gpt2":  # an output without a bias is not GPT-2's
            assert status == 2 and "cannot be exported" in said.err
            continue
        assert status == 0 and json.loads(said.out)["family"] == "llama"
        asked = ["--prompt", "alpha", "--max-tokens", "5", "--temperature", "0", "--slots", "1", *ON_ONE, "--json"]
        told = []
        for model in (run, out):
            assert main(["generate", str(model), *asked]) == 0
            told.append(json.loads(capsys.readouterr().out))
        assert told[0] == told[1]
        config = json.loads((out / "config.json").read_text())
        assert config["bos_token_id"] == config["eos_token_id"] == 256


def test_a_model_without_a_tokenizer_and_with_few_ids_ends_its_texts_and_is_given_back(tmp_path, capsys):
    """`eos_token_id` of either file ends a text of token ids, before an import and after it."""
    model, run, rows = tmp_path / "model", tmp_path / "run", 96
    config = json.loads((PUBLISHED / "config.json").read_text()) | {"vocab_size": rows, "is_llama_config": True}
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    there = {name: tensor.read() for name, tensor in PublishedModel(PUBLISHED).stored.items()}
    there = {name: np.array(x[:rows] if name in tables else x) for name, x in there.items()}
    model.mkdir()
    tensors = {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in there.items()}
    safetensors.write(model / "model.safetensors", tensors, {})
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    options = ["--token-ids", "1,70,71", "--max-tokens", "12", "--temperature", "0", *AS_FEW, *ON_ONE, "--json"]

    def generated(path):
        assert main(["generate", str(path), *options]) == 0
        answer = json.loads(capsys.readouterr().out)
        return answer["token_ids"], answer["finish_reason"]

    ids, reason = generated(model)
    assert len(ids) == 12 and reason == "length"
    end = ids[8]
    until = ids[: ids.index(end)], "stop"
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": [rows - 1, end]}))
    assert generated(model) == until
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": rows - 1}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    assert main(["import", str(model), str(run)]) == 0
    said = capsys.readouterr()
    assert "keys of config.json that change no result, kept for an export: is_llama_config" in said.out + said.err
    assert generated(run) == until
    assert main(["export", str(run), str(tmp_path / "back")]) == 0
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()
