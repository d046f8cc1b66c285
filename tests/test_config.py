import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm import config
from jaxlm.config import check_mesh, load, mesh_sizes, overridden
from jaxlm.errors import InputError

CONFIGS = Path(__file__).parents[1] / "configs"
ALL = sorted(CONFIGS.rglob("*.toml"))
PUBLISHED = sorted((CONFIGS / "models").glob("*.toml"))

SMALL = Path("little.toml")
CONTENT = """
[model]
vocabulary = 4096
context = 256
layers = 4
width = 256

[model.norm]
kind = "rms"

[model.position]
kind = "rotary"

[model.attention]
heads = 8
kv_heads = 4

[model.feed_forward]
hidden = 768
activation = "silu"

[data]
text = "stdlib"

[training]
steps = 400
batch = 16
dtype = "float32"
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working directory that holds the small experiment."""
    (tmp_path / SMALL).write_text(CONTENT)
    monkeypatch.chdir(tmp_path)


def refusal(*overrides: str, path: Path = SMALL) -> str:
    """The one line with which a configuration is refused."""
    with pytest.raises(InputError) as refused:
        load(path, overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def flat(values: dict, prefix: str = "") -> dict:
    """Nested tables as dotted keys."""
    pairs = {}
    for key, value in values.items():
        pairs.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return pairs


def changed(*overrides: str) -> dict:
    """The keys of the small experiment that overrides change, with their new values."""
    before, after = flat(load(SMALL).model_dump()), flat(load(SMALL, overrides).model_dump())
    return {key: value for key, value in after.items() if key not in before or before[key] != value}


# Files


def test_the_files_that_others_rely_on_are_there():
    names = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in ALL}
    models = "gpt2-124m gpt2-355m gpt2-774m gpt2-1.5b llama2-7b llama2-13b llama2-70b"
    models += " llama3.1-8b llama3.1-70b llama3.1-405b qwen3-0.6b qwen3-8b"
    assert {"quickstart", "shakespeare_char"} | {f"models/{name}" for name in models.split()} <= names


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_resolved_file_loads_back_to_the_same_experiment(path, tmp_path):
    experiment = load(path)
    resolved = write(tmp_path / "config.toml", experiment.to_toml())
    assert load(resolved) == experiment
    assert load(resolved).to_toml() == experiment.to_toml()


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.remat=['query', 'up']",),
        ("mesh.data=2", "mesh.fsdp=4", "mesh.tensor=2"),
        ("data.text=['a b.txt', '~/*.md', 'quo\"te.py', 'back\\slash', 'Grüße']", "data.tokenizer=a/t.json"),
        ("model.position.scaling={factor=4.0, original_context=128}", "training.sequence=100"),
        ("optimizer.learning_rate=1.2345678901234567e-5", "optimizer.epsilon=1e-30"),
        ("optimizer.kind=muon", "optimizer.adam_learning_rate=1e-3", "training.ema_decay=0.999"),
        ("optimizer.groups=[{pattern='*/scale', weight_decay=0.5}, {pattern='*', learning_rate_scale=0}]",),
        ("optimizer={kind='lion', schedule={kind='constant', warmup_steps=3}}",),
    ],
    ids=lambda overrides: overrides[0].partition("=")[0],
)
def test_overrides_are_resolved_and_loaded_back(overrides, tmp_path):
    experiment = load(SMALL, overrides)
    assert experiment != load(SMALL)
    assert load(write(tmp_path / "config.toml", experiment.to_toml())) == experiment


def test_a_resolved_file_holds_every_key():
    """A default that changes later does not change an old run."""
    written = flat(config.tomllib.loads(load(SMALL).to_toml()))
    missing = flat(load(SMALL).model_dump()).keys() - written.keys()
    # None cannot be written.
    records = {"records.wandb_project", "records.norms_every"}
    assert missing == {"model.position.scaling", "training.ema_decay", "data.documents"} | records


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_architecture_is_a_model_and_nothing_else(path):
    assert set(config.tomllib.loads(path.read_text())) == {"model"}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_file_opens_with_the_command_that_runs_it(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# jaxlm train configs/{path.relative_to(CONFIGS).as_posix()}")


def test_configurations_need_no_jax():
    code = "import sys, jaxlm.config; raise SystemExit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no file"),
        (b"[model", "is not TOML"),
        (b"[model]\nlayers = 1\nlayers = 2\n", "is not TOML"),
        (b"name = '\xff'", "cannot be read"),
    ],
    ids=["missing", "broken", "twice", "latin-1"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, says):
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    said = refusal(path=path)
    assert "mine.toml" in said and says in said


def test_a_directory_is_no_configuration(tmp_path):
    assert str(tmp_path) in refusal(path=tmp_path)


# Overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.log_every=7", "training.log_every", 7),
        ("optimizer.learning_rate=1e-5", "optimizer.learning_rate", 1e-5),
        ("optimizer.weight_decay=0", "optimizer.weight_decay", 0.0),
        ("model.tied_embeddings=true", "model.tied_embeddings", True),
        ("training.dtype=bfloat16", "training.dtype", "bfloat16"),
        ('training.dtype="bfloat16"', "training.dtype", "bfloat16"),
        (" training.dtype = 'bfloat16'", "training.dtype", "bfloat16"),
        ("mesh.fsdp=2", "mesh.fsdp", 2),
        ("data.text=some/file.txt", "data.text", ("some/file.txt",)),
        ("data.text=a=b #1.txt", "data.text", ("a=b #1.txt",)),
        ('data.text=["a.txt", "b.md"]', "data.text", ("a.txt", "b.md")),
        ("training.remat=full", "training.remat", "full"),
        ("training.remat=['query', 'up']", "training.remat", ("query", "up")),
        ("optimizer.schedule.warmup_steps=3", "optimizer.schedule.warmup_steps", 3),
        ("optimizer.schedule={warmup_steps=3, decay_steps=400}", "optimizer.schedule.warmup_steps", 3),
        ("checkpoint.keep=5", "checkpoint.keep", 5),
    ],
)
def test_an_override_sets_its_key_and_no_other(override, key, value):
    assert changed(override) == {key: value}


def test_the_last_override_of_a_key_holds():
    assert changed("training.batch=4", "training.batch=6") == {"training.batch": 6}


def test_fsdp_over_all_devices_is_the_default_and_can_be_said():
    assert load(SMALL).mesh.fsdp == "all" and changed("mesh.fsdp=all") == {}


@pytest.mark.parametrize("override", ["training.steps", "=3", "training.=3", ".steps=3", "a..b=3", ""])
def test_an_override_that_is_none_is_quoted_with_an_example(override):
    assert refusal(override).startswith(f"{override!r} is no override; write key=value, such as ")


def test_a_value_has_no_keys():
    said = refusal("training.steps.more=3")
    assert "training.steps.more" in said and "steps is a value" in said


# model.base


@pytest.fixture
def base(tmp_path):
    model = CONTENT.partition("[data]")[0]
    return write(tmp_path / "models" / "small.toml", model + "[training]\nsteps = 123\n")


def test_a_base_is_found_from_the_file_that_names_it(base, tmp_path, monkeypatch):
    expected = load(SMALL).model
    path = write(tmp_path / "runs" / "mine.toml", '[model]\nbase = "../models/small.toml"\n')
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert load(path).model == expected


def test_the_other_keys_of_a_model_change_its_base(base):
    path = base.with_name("mine.toml")
    write(path, '[model]\nbase = "small.toml"\nlayers = 9\nattention.kv_heads = 2\nnorm.epsilon = 1e-3\n')
    before, after = (flat(load(p).model.model_dump()) for p in (SMALL, path))
    assert {key: value for key, value in after.items() if before[key] != value} == {
        "layers": 9,
        "attention.kv_heads": 2,
        "norm.epsilon": 1e-3,
    }


def test_a_table_of_another_kind_takes_the_place_of_its_base(tmp_path):
    big = Path(__file__).parents[1] / "configs" / "models" / "llama3.1-8b.toml"

    def on_it(changes):
        return load(write(tmp_path / "mine.toml", f"[model]\nbase = {str(big)!r}\n{changes}\n")).model

    assert on_it('position = { kind = "learned" }').position.model_dump() == {"kind": "learned"}
    assert on_it('norm.kind = "layer"').norm.model_dump() == {"kind": "layer", "epsilon": 1e-5, "bias": True}
    before, after = load(big).model.position, on_it('position = { kind = "rotary", base = 5.0 }').position
    assert before.scaling is not None and after == before.model_copy(update={"base": 5.0})


def test_defaults_that_depend_on_other_keys_follow_a_changed_base(base):
    path = write(base.with_name("mine.toml"), '[model]\nbase = "small.toml"\nwidth = 512\ncontext = 64\n')
    experiment = load(path)
    assert (experiment.model.attention.head_width, experiment.training.sequence) == (64, 64)


def test_only_the_model_of_a_base_counts(base):
    assert load(write(base.with_name("mine.toml"), '[model]\nbase = "small.toml"\n')).training.steps == 1000


def test_overrides_change_what_a_base_says(base):
    path = write(base.with_name("mine.toml"), '[model]\nbase = "small.toml"\nlayers = 9\n')
    assert load(path, ["model.layers=3", "model.attention.kv_heads=8"]).model.attention.kv_heads == 8
    assert load(path, ["model.layers=3"]).model.layers == 3


def test_the_resolved_file_needs_no_base(base, tmp_path):
    experiment = load(write(base.with_name("mine.toml"), '[model]\nbase = "small.toml"\nlayers = 9\n'))
    assert load(write(tmp_path / "elsewhere" / "config.toml", experiment.to_toml())) == experiment


def test_a_missing_base_is_named(tmp_path):
    said = refusal(path=write(tmp_path / "mine.toml", '[model]\nbase = "nowhere.toml"\n'))
    assert "nowhere.toml" in said


@pytest.mark.parametrize("content", ["model = 5\n", "model = [1]\n"])
def test_a_base_whose_model_is_no_section_is_refused(tmp_path, content):
    write(tmp_path / "odd.toml", content)
    said = refusal(path=write(tmp_path / "mine.toml", '[model]\nbase = "odd.toml"\n'))
    assert "model" in said and ".toml" in said


# Defaults that come from elsewhere


def test_the_sequence_is_the_context_unless_given():
    assert load(SMALL).training.sequence == 256
    assert load(SMALL, ["model.context=128"]).training.sequence == 128
    assert load(SMALL, ["training.sequence=100"]).training.sequence == 100


def test_the_schedule_decays_over_the_steps_unless_given():
    assert load(SMALL).optimizer.schedule.decay_steps == 400
    assert load(SMALL, ["training.steps=50"]).optimizer.schedule.decay_steps == 50
    assert load(SMALL, ["optimizer.schedule.decay_steps=7"]).optimizer.schedule.decay_steps == 7


def test_the_schedule_decays_over_the_default_steps_too():
    experiment = load(CONFIGS / "models" / "gpt2-124m.toml")
    assert experiment.optimizer.schedule.decay_steps == experiment.training.steps


@pytest.mark.parametrize("kind", ["cosine", "linear", "warmup_stable_decay"])
def test_every_schedule_that_decays_does_so_over_the_steps(kind):
    schedule = load(SMALL, [f"optimizer.schedule.kind={kind}"]).optimizer.schedule
    assert (schedule.kind, schedule.decay_steps) == (kind, 400)


def test_the_optimizer_is_adamw_under_a_cosine_unless_given():
    optimizer = load(SMALL).optimizer
    assert (optimizer.kind, optimizer.schedule.kind) == ("adamw", "cosine")


def test_a_kind_brings_its_own_defaults():
    kinds = ("adamw", "muon", "adafactor", "lion", "sgd")
    rates = {kind: load(SMALL, [f"optimizer.kind={kind}"]).optimizer.learning_rate for kind in kinds}
    assert rates == {"adamw": 3e-4, "muon": 3e-4, "adafactor": 1e-2, "lion": 1e-4, "sgd": 0.1}


def test_heads_are_multi_head_and_share_the_width_unless_given():
    attention = load(SMALL, ["model.attention={heads=4}"]).model.attention
    assert (attention.heads, attention.kv_heads, attention.head_width) == (4, 4, 64)
    attention = load(CONFIGS / "models" / "qwen3-0.6b.toml").model.attention
    assert (attention.heads, attention.kv_heads, attention.head_width) == (16, 8, 128)


@pytest.mark.parametrize("path", [SMALL, CONFIGS / "models" / "gpt2-124m.toml"], ids=["with [data]", "without [data]"])
def test_the_cache_follows_the_environment(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert load(path).data.cache == str(tmp_path / "mine" / "jaxlm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert load(path).data.cache == "~/.cache/jaxlm"
    assert load(path, ["data.cache=/there"]).data.cache == "/there"


# Unknown keys


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.step", "training.steps"),
        ("trainig.steps", "training"),
        ("model.attention.head", "model.attention.heads"),
        ("model.feedforward.hidden", "model.feed_forward"),
        ("optimizer.lr_rate", "optimizer.learning_rate"),
        ("optimizer.schedule.warmup", "optimizer.schedule.warmup_steps"),
        ("optimizer.warmup_steps", "optimizer.schedule.warmup_steps"),
        ("checkpoint.evry", "checkpoint.every"),
        ("mesh.tensors", "mesh.tensor"),
        ("steps", "training.steps"),
        ("vocabulary", "model.vocabulary"),
        ("data.tokeniser", "data.tokenizer"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, meant):
    said = refusal(f"{key}=1")
    assert said.endswith(f"did you mean {meant}?")
    unknown = said.partition("unknown key ")[2].partition(";")[0]
    assert f"{key}.".startswith(f"{unknown}.")


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("zzz", ["training", "mesh"]),
        ("model.zzz", ["layers", "width"]),
        ("training.zzz", ["steps", "batch"]),
        ("checkpoint.zzz", ["every", "keep"]),
    ],
)
def test_a_key_like_no_other_is_told_the_keys_of_its_section(key, known):
    said = refusal(f"{key}=1")
    assert f"unknown key {key}" in said and not [name for name in known if name not in said], said
    assert "[]" not in said


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("model.norm={kind='rms', bias=true}", "model.norm.bias"),
        ("model.position={kind='learned', base=1.0}", "model.position.base"),
    ],
)
def test_a_key_of_another_kind_is_not_answered_with_itself(table, key):
    said = refusal(table)
    assert f"unknown key {key}" in said and f"did you mean {key}?" not in said


def test_a_key_of_two_lines_is_refused_in_one():
    assert "unknown key" in refusal("first\nsecond=1")


# Refusals. Each names its key, what is wrong and, where there is one, the number to set.


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.steps=many", ["training.steps = 'many'", "integer"]),
        ("training.steps=0", ["training.steps = 0", "greater than 0"]),
        (f"training.batch={10**29}", [f"training.batch = {10**29}", "less than 2147483648"]),
        ("training.batch=1e29", ["training.batch = 1e+29", "integer"]),
        (f"training.batch={'1' * 5000}", ["training.batch = '111", "integer"]),
        ("model.layers=2147483648", ["model.layers = 2147483648", "less than 2147483648"]),
        ("mesh.fsdp=2147483648", ["mesh.fsdp = 2147483648", "less than 2147483648"]),
        ("training.steps=1.5", ["training.steps = 1.5", "integer"]),
        ("training.seed=-1", ["training.seed = -1", "0"]),
        ("training.dropout=1", ["training.dropout = 1", "less than 1"]),
        ("training.dtype=float16", ["training.dtype = 'float16'", "float32", "bfloat16"]),
        ("training.remat=some", ["training.remat", "some", "none", "full", "query"]),
        ("training.remat=['query', 'norm']", ["training.remat", "norm", "attention"]),
        ("training.remat=['up', 'gate']", ["training.remat", "gate", "model.feed_forward.gated"]),
        ("training=5", ["training must be a section", "[training]"]),
        ("model=5", ["model must be a section", "[model]"]),
        ("optimizer.schedule=5", ["optimizer.schedule must be a section"]),
        ("model.norm=rms", ["model.norm must be a section"]),
        ("model.norm={}", ["model.norm.kind is missing"]),
        ("model.norm.kind=group", ["model.norm.kind = 'group'", "rms", "layer"]),
        ("model.position={kind='alibi'}", ["model.position.kind = 'alibi'", "learned", "rotary"]),
        ("model.position.scaling={factor=2.0}", ["model.position.scaling.original_context is missing"]),
        (
            "model.position.scaling={factor=2.0, original_context=8, high_frequency_factor=1.0}",
            ["model.position.scaling", "high_frequency_factor must be larger than low_frequency_factor"],
        ),
        ("model.feed_forward.activation=swiglu", ["model.feed_forward.activation = 'swiglu'", "silu"]),
        ("model.attention={}", ["model.attention.heads is missing"]),
        ("model.attention.heads=7", ["attention.heads = 7", "width = 256", "head_width"]),
        ("model.attention.heads=7.5", ["model.attention.heads = 7.5", "integer"]),
        ("model.attention.heads='eight'", ["model.attention.heads = 'eight'", "integer"]),
        ("model.attention.kv_heads=3", ["attention.kv_heads = 3", "attention.heads = 8"]),
        ("model.attention.head_width=31", ["attention.head_width = 31", "even"]),
        ("model.layers=-2", ["model.layers = -2", "greater than 0"]),
        ("optimizer.kind=sdg", ["optimizer.kind = 'sdg'", "adamw", "muon", "adafactor", "lion", "sgd"]),
        ("optimizer.kind=5", ["optimizer.kind = '5'", "adamw"]),
        ("optimizer=5", ["optimizer must be a section"]),
        ("optimizer.momentum=0.5", ["unknown key optimizer.momentum", "optimizer.kind = 'muon' or 'sgd'"]),
        ("optimizer.schedule.kind=wsd", ["optimizer.schedule.kind = 'wsd'", "cosine", "warmup_stable_decay"]),
        (
            "optimizer.schedule={kind='constant', decay_steps=9}",
            ["unknown key optimizer.schedule.decay_steps", "'cosine' or 'linear' or 'warmup_stable_decay'"],
        ),
        ("optimizer.schedule={kind='warmup_stable_decay', decay_fraction=0}", ["decay_fraction = 0", "greater than 0"]),
        ("optimizer.groups=5", ["optimizer.groups = 5 must be a list"]),
        ("optimizer.groups=[5]", ["optimizer.groups[0] must be a section"]),
        ("optimizer.groups=[{}]", ["optimizer.groups[0].pattern is missing"]),
        ("optimizer.groups=[{pattern='*', scale=2}]", ["optimizer.groups[0].scale", "learning_rate_scale"]),
        (
            "optimizer.groups=[{pattern='a'}, {pattern='b', learning_rate_scale=-1}]",
            ["optimizer.groups[1].learning_rate_scale = -1", "greater than or equal to 0"],
        ),
        ("training.ema_decay=1", ["training.ema_decay = 1", "less than 1"]),
        ("training.z_loss=-1", ["training.z_loss = -1", "greater than or equal to 0"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate = nan", "finite"]),
        ("optimizer.learning_rate=inf", ["optimizer.learning_rate = inf", "finite"]),
        ("optimizer.schedule.final_fraction=2", ["optimizer.schedule.final_fraction = 2", "1"]),
        ("data.text=[]", ["data.text", "no text", "stdlib"]),
        ("data.text=5", ["data.text = 5"]),
        ("data.held_out=1", ["data.held_out = 1", "less than 1"]),
        ("data.held_out=0.0", ["data.held_out = 0.0", "greater than 0"]),
        ("data.sources.web.text=a.txt", ["data.text and data.sources are both given", "[data.sources.NAME]"]),
        ("data.max_broken=1", ["data.max_broken = 1", "less than 1"]),
        ("data.documents=0", ["data.documents = 0", "greater than 0"]),
        ("data.tokenizer=gpt2", ["data.tokenizer", "gpt2", "bytes, characters, bpe", "tokenizer.json"]),
        ("mesh.fsdp=0", ["mesh.fsdp = 0", "greater than 0"]),
        ("mesh.fsdp=most", ["mesh.fsdp = 'most'", "all"]),
        ("training.sequence=257", ["training.sequence = 257", "model.context = 256"]),
        ("training.microbatches=3", ["training.microbatches = 3", "training.batch = 16", "1, 2, 4, 8, 16"]),
        ("mesh.tensor=3", ["mesh.tensor = 3", "model.attention.heads = 8", "1, 2, 4, 8"]),
        ("mesh.fsdp=3", ["mesh.fsdp = 3", "model.width = 256", "1, 2, 4, 8, 16"]),
        ("mesh.data=3", ["mesh.data × mesh.fsdp = 3", "16 rows", "training.batch to 18"]),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_would_be_right(override, says):
    said = refusal(override)
    assert not [part for part in says if part not in said], said


@pytest.mark.parametrize("name", ["", ".norm", ".position", ".attention", ".feed_forward"])
def test_a_missing_section_is_named(name, tmp_path):
    section = f"model{name}"
    tables = CONTENT.replace("[", "\f[").split("\f")
    kept = [table for table in tables if not table.startswith((f"[{section}]", f"[{section}."))]
    assert f"{section} is missing" in refusal(path=write(tmp_path / "mine.toml", "".join(kept)))


def test_the_number_of_further_errors_is_said():
    assert "(and 1 more)" in refusal("training.batch=0", "training.seed=-1")


def test_all_unknown_keys_are_named():
    said = refusal("model.attention.window=128", "model.depth=2", "training.batch=0")
    keys = re.search(r"unknown key (\S+);.* \(unknown too: (\S+)\) \(and 1 more\)$", said)
    assert keys and {*keys.groups()} == {"model.attention.window", "model.depth"}


def test_bytes_need_their_vocabulary():
    said = refusal("data.tokenizer=bytes", "model.vocabulary=256")
    assert "model.vocabulary = 256" in said and "set model.vocabulary=257" in said
    assert load(SMALL, ["data.tokenizer=bytes", "model.vocabulary=257"]).model.vocabulary == 257


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (["training.microbatches=3"], ["training.microbatches=8"]),
        (["mesh.tensor=3"], ["mesh.tensor=4"]),
        (["mesh.fsdp=3"], ["mesh.fsdp=16"]),
        (["mesh.data=3"], ["mesh.data=3", "training.batch=18"]),
        (
            ["training.microbatches=2", "mesh.data=3"],
            ["training.microbatches=2", "mesh.data=3", "training.batch=18"],
        ),
        (["mesh.tensor=8", "model.vocabulary=4097"], ["mesh.tensor=8", "model.vocabulary=4104"]),
        (["mesh.tensor=4", "model.feed_forward.hidden=770"], ["model.feed_forward.hidden=772"]),
    ],
    ids=str,
)
def test_the_number_that_a_refusal_names_is_accepted(wrong, right):
    said = refusal(*wrong)
    assert right[-1].partition("=")[2] in said.replace(",", " ").split()
    load(SMALL, right)


@pytest.mark.parametrize("override", ["model.attention.heads=8.0", "model.width='256'"])
def test_a_number_written_otherwise_is_that_number_or_refused_by_its_name(override):
    try:
        assert load(SMALL, [override]) == load(SMALL)
    except InputError as error:
        assert f"{override.partition('=')[0]} =" in str(error)


@pytest.mark.parametrize("override", ["training.steps=true", "optimizer.learning_rate=true", "mesh.tensor=false"])
def test_a_switch_is_no_number(override):
    key, _, value = override.partition("=")
    said = refusal(override)
    assert f"{key} = '{value}'" in said and "more" not in said


def test_a_learning_rate_that_float32_does_not_have_is_refused():
    assert "optimizer.learning_rate = 1e+39" in refusal("optimizer.learning_rate=1e39")


def test_a_seed_that_the_order_of_the_rows_cannot_take_is_refused():
    assert load(SMALL, [f"training.seed={2**32 - 1}"]).training.seed == 2**32 - 1
    assert "training.seed = 4294967296" in refusal(f"training.seed={2**32}")


# The mesh


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        ([], 1, (1, 1, 1)),
        ([], 8, (1, 8, 1)),
        (["mesh.data=2", "mesh.tensor=2"], 8, (2, 2, 2)),
        (["mesh.data=2", "mesh.tensor=4"], 8, (2, 1, 4)),
        (["mesh.data=4", "mesh.fsdp=2"], 8, (4, 2, 1)),
        (["mesh.fsdp=2"], 8, (1, 2, 1)),  # fewer than there are
        (["mesh.fsdp=all", "mesh.tensor=8"], 16, (1, 2, 8)),
    ],
)
def test_the_mesh_factors_the_devices(mesh, devices, sizes):
    assert mesh_sizes(load(SMALL, mesh), devices) == sizes


@pytest.mark.parametrize(
    ("overrides", "devices", "says"),
    [
        (["mesh.tensor=8"], 12, ["mesh.data × mesh.tensor = 8 does not divide the 12 devices"]),
        (["mesh.data=2", "mesh.tensor=4"], 4, ["mesh.data × mesh.tensor = 8", "4 devices", "mesh.fsdp"]),
        (["mesh.data=2", "mesh.fsdp=4", "mesh.tensor=2"], 8, ["16 devices and 8 are here"]),
        (["mesh.fsdp=2"], 1, ["2 devices and 1 is here"]),
        ([], 3, ["mesh.fsdp = 3 does not divide model.width = 256"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(overrides, devices, says):
    with pytest.raises(InputError) as refused:
        mesh_sizes(load(SMALL, overrides), devices)
    said = str(refused.value)
    assert "\n" not in said and not [part for part in says if part not in said], said


@pytest.mark.parametrize(
    ("overrides", "sizes", "key"),
    [
        ([], (1, 1, 16), "model.attention.heads = 8"),
        (["model.feed_forward.hidden=772"], (1, 1, 8), "model.feed_forward.hidden = 772"),
        (["model.vocabulary=4100"], (1, 1, 8), "model.vocabulary = 4100"),
        ([], (1, 6, 1), "model.width = 256"),
    ],
)
def test_a_mesh_divides_heads_feed_forward_vocabulary_and_width(overrides, sizes, key):
    experiment = load(SMALL, overrides)
    check_mesh(experiment, 1, 1, 1)
    with pytest.raises(InputError) as refused:
        check_mesh(experiment, *sizes)
    assert key in str(refused.value)


def test_only_training_asks_that_a_mesh_divides_the_rows_of_a_microbatch():
    overrides = ["training.batch=7", "training.microbatches=2", "mesh.data=4"]
    with pytest.raises(InputError, match="training.microbatches = 2 does not divide training.batch = 7"):
        load(SMALL, overrides)
    experiment = load(SMALL, overrides, "decode")
    assert mesh_sizes(experiment, 8, "decode") == (4, 2, 1)
    with pytest.raises(InputError, match="the 3 rows of a microbatch"):
        mesh_sizes(experiment, 8)
    with pytest.raises(InputError, match="model.attention.heads = 8"):
        check_mesh(experiment, 1, 1, 16, "decode")


def test_the_keys_that_overrides_set_are_named():
    given = ["training.steps=3", "mesh={data=2, tensor=2}", "data.sources.web.weight=2", "data.tokenizer=bytes"]
    assert overridden(given) == [
        "training.steps", "mesh.data", "mesh.tensor", "data.sources.web.weight", "data.tokenizer",
    ]  # fmt: skip


def test_a_base_may_have_a_base_but_not_itself(tmp_path):
    write(tmp_path / "a.toml", SMALL.read_text())
    write(tmp_path / "b.toml", '[model]\nbase = "a.toml"\nlayers = 7\n')
    model = load(write(tmp_path / "c.toml", '[model]\nbase = "b.toml"\ncontext = 32\n')).model
    assert (model.layers, model.context) == (7, 32) and model.width == load(SMALL).model.width
    with pytest.raises(InputError, match="leads back to itself"):
        load(write(tmp_path / "d.toml", '[model]\nbase = "d.toml"\n'))


MIXED = Path("mixed.toml")
SOURCES = """
[data.sources.web]
text = "web.jsonl.zst"
weight = 3

[data.sources.code]
text = ["code/", "more.py"]
field = "content"
"""


@pytest.fixture
def mixed(place):
    MIXED.write_text(CONTENT.replace('text = "stdlib"', "") + SOURCES)
    return MIXED


def test_sources_are_mixed_by_their_share_of_all_weights(mixed):
    described = load(mixed).data.described()
    assert list(described) == ["data.sources.web.text", "data.sources.code.text"]
    web, code = described.values()
    assert (web.text, web.field, web.weight) == (("web.jsonl.zst",), "text", 0.75)
    assert (code.text, code.field, code.weight) == (("code/", "more.py"), "content", 0.25)


def test_one_text_is_one_source():
    (source,) = load(SMALL, ["data.text=a.jsonl", "data.field=content"]).data.described().values()
    assert (source.text, source.field, source.weight) == (("a.jsonl",), "content", 1.0)


def test_what_is_said_for_all_sources_holds_where_one_says_nothing(mixed):
    web, code = load(mixed, ["data.field=body", "data.documents=7"]).data.described().values()
    assert (web.field, web.documents, code.field, code.documents) == ("body", 7, "content", 7)


def test_a_mixture_loads_back_the_same(mixed, tmp_path):
    written = tmp_path / "written.toml"
    written.write_text(load(mixed).to_toml())
    assert load(written) == load(mixed)


def test_sources_come_from_the_command_line_too(mixed):
    web, code, new = (
        load(mixed, ["data.sources.code.weight=9", "data.sources.new.text=n.txt"]).data.described().values()
    )
    assert (web.weight, code.weight, new.weight) == (3 / 13, 9 / 13, 1 / 13)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.text=a.txt", ["data.text and data.sources are both given"]),
        ("data.sources.web.weight=0", ["data.sources.web.weight = 0", "greater than 0"]),
        ("data.sources.web.text=[]", ["data.sources.web.text", "no text"]),
        ("data.sources.new.weight=1", ["data.sources.new.text is missing"]),
        ("data.sources.web=a.txt", ["[data.sources.web]"]),
        ("data.sources.web.wait=1", ["did you mean data.sources.web.weight?"]),
        (
            "data.sources.web.tokenizer=bytes",
            ["unknown key data.sources.web.tokenizer", "did you mean data.tokenizer?"],
        ),
        ("data.sources.a b.text=a.txt", ["'a b'", "letters, digits"]),
    ],
)
def test_a_source_that_is_none_is_refused(mixed, override, says):
    said = refusal(override, path=mixed)
    assert not [part for part in says if part not in said], said
