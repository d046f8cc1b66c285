"""`jaxlm config`: every key with its type, default and meaning."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from jaxlm.cli import main
from jaxlm.config import load
from jaxlm.config.experiment import Experiment
from jaxlm.core.explain import _keys
from jaxlm.core.reference import tables

ROOT = Path(__file__).parents[2]
KEYS = {key.key: key for table in reversed(tables(Experiment)) for key in table.keys}  # of the first kind


def said(capsys, *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out


def test_every_key_has_a_type_a_default_and_a_meaning():
    assert [key for key in KEYS.values() if not (key.type and key.default and key.meaning)] == []


def test_every_table_says_what_it_is():
    assert [table.name for table in tables(Experiment) if table.keys and not table.about] == []


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda file: file.stem)
def test_the_keys_of_every_configuration_are_among_them(file):
    values = load(file).model_dump(mode="json")
    known = {key.replace("[]", "") for key in KEYS} | {table.name.replace("[]", "") for table in tables(Experiment)}
    assert set(_keys(Experiment, values)) - known == set()


@pytest.mark.parametrize(
    ("key", "type", "default"),
    [
        ("execution.remat", '"none" | "full" | list of strings', '"none"'),
        ("training.sequence", "integer > 0", "model.context_length, at most 8192"),
        ("training.ema_decay", "number > 0 and < 1", "not set"),
        ("training.seed", "integer ≥ 0 and < 4294967296", "0"),
        ("data.text", "string | list of strings", '"stdlib" without sources'),
        ("data.cache", "string", "$XDG_CACHE_HOME/jaxlm, or ~/.cache/jaxlm"),
        ("mesh.fsdp", 'integer > 0 | "all"', '"all"'),
        ("model.attention.head_dim", "integer > 0", "model.d_model / num_heads"),
        ("model.norm.kind", '"rms" | "layer"', '"rms"'),
        ("model.feed_forward.gated", "true | false", "true without `activation`, false with one"),
        ("model.attention.time_limits", "list of numbers ≥ 0", "none"),
        ("optimizer.groups", "list of tables", "[]"),
        ("optimizer.groups[].pattern", "string", "required"),
        ("data.sources.NAME.field", "string", "data.field"),
    ],
)
def test_types_and_defaults(key, type, default):
    assert (KEYS[key].type, KEYS[key].default) == (type, default)


def test_a_key_alone_is_told_for_each_kind(capsys):
    found = json.loads(said(capsys, "optimizer.beta2", "--json"))["keys"]
    assert [(key["kind"], key["default"]) for key in found] == [("adamw", "0.95"), ("muon", "0.95"), ("lion", "0.99")]
    assert {key["key"] for key in found} == {"optimizer.beta2"}
    assert "activations named" in " ".join(said(capsys, "execution.remat").split())


def test_a_table_is_told_whole_and_names_stand_for_any(capsys):
    keys = {key["key"] for key in json.loads(said(capsys, "optimizer.schedule", "--json"))["keys"]}
    assert keys == {f"optimizer.schedule.{k}" for k in ("kind", "warmup_steps", "decay_steps", "final_fraction")} | {
        "optimizer.schedule.decay_fraction"
    }
    (key,) = json.loads(said(capsys, "data.sources.web.weight", "--json"))["keys"]
    assert key["key"] == "data.sources.NAME.weight"
    assert json.loads(said(capsys, "optimizer.groups[0].pattern", "--json"))["keys"][0]["type"] == "string"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("execution.rematt", "execution.remat"),
        ("training.remat", "is now execution.remat"),
        ("beta2", "optimizer.beta2"),
        ("xyzzy", "lists them"),
    ],
)
def test_an_unknown_key_is_one_line(key, near, capsys):
    assert main(["config", key]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and near in err


def test_the_configurations_that_come_with_it_are_listed(capsys):
    rows = json.loads(said(capsys, "--list", "--json"))["configurations"]
    assert {Path(row["file"]).resolve() for row in rows} == set((ROOT / "configs").rglob("*.toml"))
    found = {row["name"]: (row["kind"], row["parameters"]) for row in rows}
    assert found["llama3.1-8b"] == ("model", 8_030_261_248) and found["quickstart"][0] == "experiment"
    lines = said(capsys, "--list").splitlines()
    for name, (kind, parameters) in found.items():
        assert [name, kind, f"{parameters:,}"] in [line.split() for line in lines]
    assert main(["config", "execution.remat", "--list"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "leave out KEY" in err


def test_the_page_is_what_the_command_prints(capsys):
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == said(capsys, "--markdown")


def test_it_starts_without_jax():
    code = "import sys; from jaxlm.cli import main; main(['config']); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_run_keeps_every_key_and_those_that_are_not_set_as_comments(tmp_path):
    file = runs.write_config(tmp_path, "training.ema_decay=0.9")
    written, name = {}, ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            written[name] = "table"
        elif " = " in line:
            key, _, value = line.partition(" = ")
            written[f"{name}.{key.removeprefix('# ')}".lstrip(".")] = value if key[0] != "#" else None
    assert written["training.ema_decay"] == "0.9" and written["model.attention.window"] is None
    for table in tables(Experiment):
        chosen = table.kind is None or written.get(f"{table.name}.kind") == f'"{table.kind}"'
        absent = "[]" in table.name or "NAME" in table.name or written.get(table.name, "table") is None
        around = [table.name.rsplit(".", i)[0] for i in range(1, table.name.count(".") + 1)]
        kinds = {written.get(f"{name}.kind") for name in around}
        absent |= table.within is not None and f'"{table.within}"' not in kinds
        assert not chosen or absent or {key.key for key in table.keys} <= written.keys()


def test_the_example_is_whole_and_its_comments_show_the_defaults(capsys, tmp_path):
    """All but those of a base, of another text and of a held-out share."""
    text = said(capsys, "--example")
    assert json.loads(said(capsys, "--example", "--json"))["example"] == text
    defaults = re.sub(r"^# (?!base|validation|held_out)(\w+ += )", r"\1", text, flags=re.MULTILINE)
    files = [tmp_path / "example.toml", tmp_path / "defaults.toml"]
    for file, content in zip(files, (text, defaults), strict=True):
        file.write_text(content)
    example, with_defaults = map(load, files)
    assert defaults.count("\n") == text.count("\n") and defaults != text
    assert example == with_defaults
    assert max(map(len, text.splitlines())) <= 120


def test_an_example_stands_alone(capsys):
    assert main(["config", "model", "--example"]) == 2
    assert "--example stands alone: leave out KEY" in capsys.readouterr().err
