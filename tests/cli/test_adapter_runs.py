"""Adapters from the command line: trained beside published weights, resumed, used, and given away."""

import json
import shutil
import signal

import numpy as np
import pytest
import runs
from story_fixtures import STORIES, shallow

from jaxlm import api
from jaxlm.cli import main
from jaxlm.core.errors import InputError
from jaxlm.families.directory import PublishedModel
from jaxlm.inference.completion import completions
from jaxlm.inference.requests import Sampling
from jaxlm.inference.settings import EngineSettings

STORY = (STORIES / "expected.txt").read_text()
CONFIG = f"""
[model]
base = "BASE"
[data]
text = "TEXT"
tokenizer = "{STORIES / "tokenizer.json"}"
held_out = 0.1
[execution]
dtype = "float32"
[training]
steps = 12
batch = 8
sequence = 64
log_every = 1
[optimizer]
learning_rate = 3e-3
[checkpoint]
every = 4
[records]
tensorboard = false
sample_tokens = 0
[lora]
rank = 4
[mesh]
fsdp = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration, a copy of the base, and a run that was trained without a stop."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text").mkdir()
    words = STORY.split()
    for number in range(40):  # the story's words backwards, which the base does not expect
        turned = words[number:] + words[:number]
        (folder / "text" / f"{number}.txt").write_text(" ".join(reversed(turned)))
    shallow(folder / "base", layers=2)
    (folder / "lora.toml").write_text(
        CONFIG.replace("TEXT", str(folder / "text")).replace("BASE", str(folder / "base"))
    )
    assert main(["train", str(folder / "lora.toml"), "--from", str(folder / "base"), "--out", str(folder / "run")]) == 0
    return folder


# A process with it compiles the programs of this one, and so takes them from the cache.
AS_HERE = "import jax; jax.config.update('jax_default_matmul_precision', 'highest')"


@pytest.mark.slow
def test_it_learns_and_resumes_after_a_kill_to_the_same_losses(folder, capsys):
    """Its checkpoints hold adapters alone, and origin.json says what they adapt."""
    expected = runs.losses(folder / "run")
    assert expected[1] > 4.5 and expected[12] < expected[1] - 0.5
    given = "--from", str(folder / "base")
    killed = runs.start(folder / "lora.toml", folder / "killed", *given, devices=8, before=AS_HERE)
    runs.wait_for_step(killed, folder / "killed", 9)  # the save of step 8 waits for the checkpoint of step 4
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    capsys.readouterr()
    assert main(["train", str(folder / "lora.toml"), "--out", str(folder / "killed")]) == 0
    said = capsys.readouterr().err
    assert "resuming from step" in said and f"adapting the weights of {folder / 'base'}" in said
    assert runs.losses(folder / "killed") == expected
    saved = sum(file.stat().st_size for file in (folder / "run" / "checkpoints" / "12" / "parameters").rglob("*"))
    assert saved < (folder / "base" / "model.safetensors").stat().st_size / 4
    assert not (folder / "run" / "sample.txt").exists()
    assert json.loads((folder / "run" / "origin.json").read_text())["source"] == str(folder / "base")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_form_of_the_model_gives_the_same_loss(folder, capsys):
    """The run, its export, its adapter beside the base, and the import of that."""
    assert main(["export", str(folder / "run"), str(folder / "merged")]) == 0
    assert main(["export", str(folder / "run"), str(folder / "adapter"), "--adapter", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"family": "llama", "parameters": 9_248}
    assert main(["import", str(folder / "adapter"), str(folder / "imported")]) == 0
    losses = []
    for name in ("base", "run", "merged", "adapter", "imported"):
        capsys.readouterr()
        assert (
            main(
                [
                    "eval",
                    str(folder / name),
                    "--data",
                    str(folder / "text"),
                    "training.sequence=64",
                    "execution.dtype=float32",
                    "--json",
                ]
            )
            == 0
        )
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    base, *others = losses
    assert base > others[0] + 0.5
    np.testing.assert_allclose(others, others[0], rtol=1e-5)
    merged, there = PublishedModel(folder / "merged"), PublishedModel(folder / "base")
    assert merged.config == there.config and merged.stored.keys() == there.stored.keys()


def refused(capsys, *arguments):
    """Return the one line that a command is refused with."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err.splitlines()
    return error[-1]


def test_adapters_need_a_base(folder, tmp_path, capsys):
    line = refused(capsys, "train", folder / "lora.toml", "--out", tmp_path / "new")
    assert "[lora] adapts the weights of a model: give --from MODEL" in line and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_base_that_is_gone_or_has_changed_is_refused_by_name(folder, tmp_path, capsys):
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.copytree(folder / "base", tmp_path / "base")
    origin = tmp_path / "run" / "origin.json"
    origin.write_text(json.dumps({**json.loads(origin.read_text()), "source": str(tmp_path / "base")}))
    asked = "generate", tmp_path / "run", "--prompt", "Once", "--max-tokens", "1"
    assert main([str(argument) for argument in asked]) == 0
    stored = bytearray((tmp_path / "base" / "model.safetensors").read_bytes())
    stored[-1] ^= 1
    (tmp_path / "base" / "model.safetensors").write_bytes(stored)
    assert f"{tmp_path / 'base'} is not the model that {tmp_path / 'run'} adapts: its weights have changed" in refused(
        capsys, *asked
    )
    shutil.rmtree(tmp_path / "base")
    assert f"{tmp_path / 'run'} adapts {tmp_path / 'base'}: " in refused(capsys, *asked)
    origin.unlink()
    assert "has adapters, and no origin.json says of which model; put it back" in refused(capsys, *asked)


@pytest.mark.slow
def test_what_does_not_suit_a_run_with_adapters_is_refused(folder, tmp_path, capsys):
    train = "train", folder / "lora.toml", "--out", folder / "run"
    assert "lora.rank = 4, not 8, which its checkpoints are bound to" in refused(capsys, *train, "lora.rank=8")
    assert "lora.alpha = 16.0, not 8.0; choose another --out" in refused(capsys, *train, "lora.alpha=8")
    with_out = "train", folder / "lora.toml", "--from", folder / "base", "--out", tmp_path / "new"
    assert "lora.targets[0] = 'q_proj': it matches no parameter; adapters go with layers/" in refused(
        capsys, *with_out, "lora.targets=['q_proj']"
    )
    assert "lora.rank = 0: input should be greater than 0" in refused(capsys, *with_out, "lora.rank=0")
    line = refused(capsys, "export", folder / "base", tmp_path / "adapter", "--adapter")
    assert f"{folder / 'base'} is no run with adapters ([lora]); leave out --adapter" in line


def test_adapters_of_an_import_name_the_directory_that_it_came_from(folder, tmp_path, capsys):
    """PEFT opens base_model_name_or_path with transformers, which reads no run."""
    base, imported, run = tmp_path / "base", tmp_path / "imported", tmp_path / "run"
    shutil.copytree(folder / "base", base)
    assert main(["import", str(base), str(imported)]) == 0
    given = ["--from", str(imported), "--out", str(run), "training.steps=1"]
    assert main(["train", str(folder / "lora.toml"), *given]) == 0
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and "PEFT needs" not in capsys.readouterr().err
    base.rename(tmp_path / "elsewhere")
    assert main(["export", str(run), str(tmp_path / "second"), "--adapter"]) == 0
    assert f"{imported} is no Hugging Face directory, as PEFT needs one: export it" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_adapters_are_served_beside_their_base(folder, tmp_path, capsys):
    """A run's and the PEFT directory that it is exported to, together with the base: each draws what it draws by
    itself, where its adapters are added to the matrices. With a temperature: the likeliest token is always one."""
    assert main(["export", str(folder / "run"), str(tmp_path / "peft"), "--adapter"]) == 0
    options = {"dtype": "float32", "engine": EngineSettings(slots=4, page=32, chunk_tokens=32, context=128)}
    model = api.load(folder / "base", adapters={"run": folder / "run", "peft": tmp_path / "peft"}, **options)
    (request,) = model.requests(["Once upon a time"], 24, 1, Sampling(temperature=1.0), ())
    names = [None, "run", "peft"]
    together = completions(model.complete([request._replace(adapter=name) for name in names]), 3)
    models = [api.load(each, **options) for each in (folder / "base", folder / "run", tmp_path / "peft")]
    alone = [each.generate(["Once upon a time"], 24, temperature=1.0)[0] for each in models]
    assert [found.text for found in together] == [found.text for found in alone]
    capsys.readouterr()
    given = "--prompt", "Once upon a time", "--max-tokens", "24", "--temperature", "1", "--json"
    for name in (folder / "run", tmp_path / "peft"):
        assert main(["generate", str(folder / "base"), "--adapter", str(name), *given]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == alone[1].text
    adapted = api.load(folder / "base", adapter=folder / "run")
    with pytest.raises(InputError, match="losses of .* are without adapter run; load the adapter by itself"):
        adapted.evaluate()
    assert together[0].text != together[1].text


@pytest.mark.slow
def test_an_adapter_that_is_not_of_what_is_served_is_refused(folder, tmp_path, capsys):
    assert main(["export", str(folder / "run"), str(tmp_path / "peft"), "--adapter"]) == 0
    shallow(tmp_path / "deeper", layers=3)
    shutil.copytree(folder / "base", tmp_path / "other")
    stored = bytearray((tmp_path / "other" / "model.safetensors").read_bytes())
    stored[-1] ^= 1
    (tmp_path / "other" / "model.safetensors").write_bytes(stored)

    def line(base, *given):
        small = "--port", "0", "--slots", "2", "--chunk-tokens", "32", "--max-context", "64"
        return refused(capsys, "serve", base, *small, *[word for each in given for word in ("--adapter", each)])

    run, peft, base = f"a={folder / 'run'}", f"a={tmp_path / 'peft'}", folder / "base"
    assert "--adapter a=… is given 2 times; give each a name of its own" in line(base, run, peft)
    assert "an adapter and the model are both called base" in line(base, f"base={folder / 'run'}")
    assert f"{base} is no run with adapters ([lora]) and no PEFT directory" in line(base, f"a={base}")
    assert f"adapter a: there is no {folder / 'none'}; give a run with [lora] or a" in line(
        base, f"a={folder / 'none'}"
    )
    assert f"there is no {folder / 'runs'}; did you mean {folder / 'run'}?" in line(base, f"a={folder / 'runs'}")
    assert "adapts another model than" in line(tmp_path / "deeper", run)
    assert f"whose weights are not those of {tmp_path / 'other'}" in line(tmp_path / "other", run)
    assert f"whose weights are not those of {tmp_path / 'other'}; serve that, or set" in line(tmp_path / "other", peft)
    assert "'nothing' should be NAME=ADAPTER, such as poet=runs/poems" in line(base, "nothing")
