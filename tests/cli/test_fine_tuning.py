"""Fine-tuning from the command line: a small published model learns to converse, and to prefer."""

import json

import numpy as np
import pytest
import runs
from story_fixtures import STORIES, shallow

from jaxlm import api
from jaxlm.cli import main
from jaxlm.families.directory import PublishedModel

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'Q: ' + m.content + (mark or '') + ' A:' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
ANIMALS = {"dog": "Woof", "cat": "Meow", "cow": "Moo", "duck": "Quack", "sheep": "Baa", "pig": "Oink"}
QUESTIONS = ["What does the {} say?", "Tell me what a {} says.", "And the {}?", "How does the {} go?"]
RUN = """
[data]
{data}
cache = "{folder}/cache"
[execution]
dtype = "float32"
[training]
steps = {steps}
batch = {batch}
sequence = 48
log_every = 1
[optimizer]
learning_rate = {rate}
schedule = {{kind = "constant", warmup_steps = 4}}
weight_decay = 0.0
[evaluation]
every = 1000
[checkpoint]
every = 10
[records]
tensorboard = false
sample_tokens = {sample}
[mesh]
fsdp = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A published model with a chat template of ours."""
    folder = tmp_path_factory.mktemp("model") / "stories"
    shallow(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """The configuration of each kind of fine-tuning, by name."""
    folder = tmp_path_factory.mktemp("records")
    asked = [(q.format(animal), animal) for q in QUESTIONS for animal in ANIMALS]
    spoken = [{"messages": [_said("user", q), _said("assistant", ANIMALS[animal])]} for q, animal in asked]
    preferred = [{"prompt": q, "chosen": ANIMALS[animal], "rejected": "I do not know"} for q, animal in asked]
    configurations = {}
    for name, lines, key, steps, rate in (
        ("chat", spoken, "chat", 32, 5e-3),
        ("dpo", preferred, "preferences", 16, 5e-4),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / f"{name}-held-out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:8]))
        data = f'{key} = "{folder}/{name}.jsonl"\nvalidation = "{folder}/{name}-held-out.jsonl"\nheld_out = 0.0'
        if name == "chat":
            data += '\nchat_template_kwargs = {mark = "."}'
        if name == "dpo":
            (folder / "own.jinja").write_text(TEMPLATE + "{# of our own #}")
            data += f'\nchat_template = "{folder}/own.jinja"'
        path = folder / f"{name}.toml"
        path.write_text(
            RUN.format(data=data, folder=folder, steps=steps, rate=rate, batch=8, sample=8 * (name == "chat"))
        )
        configurations[name] = path
    return configurations


def _said(role, content):
    return {"role": role, "content": content}


def losses(run):
    return list(runs.losses(run).values())


@pytest.fixture(scope="module")
def tuned(model, kinds, tmp_path_factory):
    """A run of each kind, by name."""
    folder = tmp_path_factory.mktemp("runs")
    for name, configuration in kinds.items():
        assert main(["train", str(configuration), "--from", str(model), "--out", str(folder / name)]) == 0
    return {name: folder / name for name in kinds}


def test_a_model_learns_to_converse(tuned, capsys):
    assert losses(tuned["chat"])[-1] < 0.2 < 2 < losses(tuned["chat"])[0]
    asked = ["--chat", "--prompt", "What does the cow say?", "--temperature", "0", "--json"]
    asked += ["--slots", "1", "--max-context", "128", "--max-tokens", "9"]  # the programs of the run's sample
    assert main(["generate", str(tuned["chat"]), *asked]) == 0
    assert json.loads(capsys.readouterr().out)["text"].strip() == "Moo"
    shown = api.load(tuned["chat"]).chat_template.render([_said("user", "Hi")], reply=True)
    assert shown == "<s>Q: Hi. A:"  # with the variables of training


def test_the_loss_on_answers_is_that_of_training(tuned, model, kinds, capsys):
    """The held-out loss of the run, from the file of its conversations, also with the template of the base."""
    conversations = kinds["chat"].with_name("chat-held-out.jsonl")

    def measured(*arguments):
        cache = ["--json", f"data.cache={kinds['chat'].parent / 'cache'}"]
        assert main(["eval", *map(str, arguments), *cache]) == 0
        return json.loads(capsys.readouterr().out)

    held_out = measured(tuned["chat"])
    answers = measured(tuned["chat"], "--chat", conversations)
    assert (answers["loss"], answers["tokens"]) == (pytest.approx(held_out["loss"], abs=1e-6), held_out["tokens"])
    assert measured(model, "--chat", conversations, "training.sequence=48")["loss"] > 2
    assert main(["eval", str(STORIES), "--chat", str(conversations)]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_a_model_learns_what_is_preferred(tuned):
    rows = runs.rows(tuned["dpo"])
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-5) and rows[-1]["loss"] < 0.2
    assert rows[-1]["accuracy"] == 1.0 and rows[-1]["margin"] > 1.0 and rows[-1]["rejected_reward"] < 0


@pytest.mark.parametrize(("name", "of"), [("chat", "conversations"), ("dpo", "pairs")])
def test_prompts_that_leave_nothing_to_learn_are_refused(name, of, kinds, model, tmp_path, capsys):
    given = ["train", str(kinds[name]), "--from", str(model), "--out", str(tmp_path / "run"), "training.sequence=8"]
    assert main(given) == 2
    said = f"jaxlm: training text of data: none of the 24 {of} has a token to learn: what is before their answers is "
    assert f"{said}longer than training.sequence = 8 tokens; raise it to " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    if name == "chat":
        conversations = str(kinds[name].with_name("chat-held-out.jsonl"))
        assert main(["eval", str(model), "--chat", conversations, "training.sequence=8"]) == 2
        assert f"{conversations}: none of the 8 conversations has a token to learn" in capsys.readouterr().err


def test_a_base_model_learns_to_converse_by_a_template_that_has_a_name(model, kinds, tmp_path, capsys):
    """Its vocabulary has none of ChatML's control tokens: an answer ends with </s>, here and where it is exported."""
    base, run, out = (tmp_path / name for name in ("base", "run", "out"))
    shallow(base)
    given = ["data.chat_template=chatml", "data.chat_template_kwargs={}", "training.sequence=96", "training.epochs=0.5"]
    given += ["records.sample_tokens=0", "evaluation.batches=1"]
    assert main(["train", str(kinds["chat"]), "--from", str(base), "--out", str(run), *given]) == 0
    assert "a ⟦Quack</s>⟧" in capsys.readouterr().err.replace("assistant\n", "a ").replace("Woof", "Quack")
    assert runs.rows(run)[-1]["step"] == api.load(run).experiment.training.steps == 2
    assert main(["export", str(run), str(out)]) == 0
    question = [_said("user", "Hi")]
    for place, named in ((run, None), (out, None), (base, "chatml")):
        template = api.load(place, chat_template=named).chat_template
        assert template.render(question, reply=True) == "<|im_start|>user\nHi</s>\n<|im_start|>assistant\n"
        assert template.stop_token_ids == {2}
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    capsys.readouterr()
    conversations = str(kinds["chat"].with_name("chat-held-out.jsonl"))
    cache = f"data.cache={kinds['chat'].parent / 'cache'}"
    asked = ["--chat", conversations, "--chat-template", "chatml", "--json", "training.sequence=96", cache]
    assert main(["eval", str(base), *asked]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 8
    assert main(["generate", str(base), "--chat", "--chat-template", "chatlm", "--prompt", "Hi"]) == 2
    assert "--chat-template: there is no file chatlm" in capsys.readouterr().err
    assert main(["generate", str(base), "--chat-template", "chatml", "--prompt", "Hi"]) == 2
    assert "--chat-template is of a conversation: add --chat" in capsys.readouterr().err


@pytest.mark.exhaustive  # test_adapter_runs.py trains adapters with AdamW
@pytest.mark.parametrize("name", ["chat", "dpo"])
@pytest.mark.parametrize("changes", [["optimizer.kind=muon"], ["training.dropout=0.1"]], ids=["muon", "dropout"])
def test_adapters_learn_by_other_optimizers_and_with_dropout(name, changes, kinds, model, tmp_path):
    changes = [*changes, "lora.rank=4", "optimizer.learning_rate=5e-3", "training.steps=24"]
    assert main(["train", str(kinds[name]), *changes, "--from", str(model), "--out", str(tmp_path / "run")]) == 0
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] / 3


@pytest.mark.exhaustive
def test_adapters_in_two_processes_train_to_the_losses_of_one(kinds, model, tmp_path):
    """To 1e-5, the tolerance in float32 across processes."""
    for count in (1, 2):
        port, run = runs.free_port(), tmp_path / str(count)
        places = [() if count == 1 else ("--process", f"{i}/{count}@127.0.0.1:{port}") for i in range(count)]
        given = ("--from", str(model), "lora.rank=4", "training.steps=8", "mesh.fsdp=4", "records.sample_tokens=0")
        started = [runs.start(kinds["dpo"], run, *given, *place, devices=4 // count) for place in places]
        for process in started:
            runs.finish(process)
    np.testing.assert_allclose(losses(tmp_path / "2"), losses(tmp_path / "1"), rtol=1e-5)


@pytest.mark.exhaustive  # test_adapter_runs.py kills a run with adapters
@pytest.mark.parametrize("name", ["chat", "dpo"])
def test_a_run_that_was_killed_goes_on_to_the_same_losses(name, kinds, model, tuned, tmp_path):
    started = runs.start(kinds[name], tmp_path / "run", "--from", str(model), devices=8)
    runs.wait_for_step(started, tmp_path / "run", 12)
    started.kill()
    started.wait()
    assert main(["train", str(tmp_path / "run")]) == 0
    assert losses(tmp_path / "run") == losses(tuned[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["chat", "dpo"])
def test_a_mesh_of_eight_devices_gives_the_same_losses(name, kinds, model, tuned, tmp_path):
    few = ["training.steps=6", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    assert main(["train", str(kinds[name]), *few, "--from", str(model), "--out", str(tmp_path / "run")]) == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tuned[name])[:6], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["chat", "dpo"])
def test_what_was_learned_is_published_with_its_template(name, tuned, model, tmp_path):
    assert main(["export", str(tuned[name]), str(tmp_path / "out")]) == 0
    for kept in ("tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / kept).read_bytes() == (model / kept).read_bytes()
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert template == TEMPLATE + "{# of our own #}" * (name == "dpo")
    assert PublishedModel(tmp_path / "out").tensors.keys() == PublishedModel(model).tensors.keys()
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from jaxlm import api

    tokens = np.random.default_rng(0).integers(3, 512, (2, 40))
    with torch.no_grad():
        theirs = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()(torch.tensor(tokens)).logits
        )
    ours = api.load(tuned[name], dtype="float32").logits(tokens)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5 * float(theirs.abs().max()))


def test_an_adapter_alone_converses_as_it_was_trained(kinds, model, tmp_path):
    from jaxlm import api

    short = ["lora.rank=4", "training.steps=2", "records.sample_tokens=0"]
    shown = ["data.chat_template=chatml", "data.chat_template_kwargs={}"]
    given = ["train", str(kinds["chat"]), *short, *shown, "--from", str(model), "--out", str(tmp_path / "run")]
    assert main(given) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    own, alone = (api.load(tmp_path / name).chat_template for name in ("run", "adapter"))
    asked = [{"role": "user", "content": "Hi"}]
    assert alone.source == own.source != api.load(model).chat_template.source
    assert alone.encode(asked, reply=True) == own.encode(asked, reply=True)
    assert alone.stop_token_ids == own.stop_token_ids
