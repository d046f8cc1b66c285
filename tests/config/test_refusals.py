"""Refusals: one line that says what is wrong and what would be right."""

import re

import pytest
import tomli_w
from config_fixtures import SMALL, refusal, write

from jaxlm.config import load
from jaxlm.core.errors import InputError
from jaxlm.core.moved_keys import RENAMED


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.step", "training.steps"),
        ("trainig.steps", "training"),
        ("model.attention.num_head", "model.attention.num_heads"),
        ("model.feedforward.d_ff", "model.feed_forward"),
        ("optimizer.lr_rate", "optimizer.learning_rate"),
        ("optimizer.schedule.warmup", "optimizer.schedule.warmup_steps"),
        ("optimizer.warmup_steps", "optimizer.schedule.warmup_steps"),
        ("checkpoint.evry", "checkpoint.every"),
        ("mesh.tensors", "mesh.tensor"),
        ("steps", "training.steps"),
        ("vocab_size", "model.vocab_size"),
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
        ("model.zzz", ["num_layers", "d_model"]),
        ("training.zzz", ["steps", "batch"]),
        ("checkpoint.zzz", ["every", "keep"]),
    ],
)
def test_a_key_like_no_other_is_told_the_keys_of_its_section(key, known):
    said = refusal(f"{key}=1")
    assert f"unknown key {key}" in said and not [name for name in known if name not in said], said
    assert "[]" not in said


@pytest.mark.parametrize("old", RENAMED)
def test_a_key_of_an_earlier_version_is_answered_with_its_present_name(old):
    key, _, value = old.partition(" = ")
    said = refusal(f"{key}={value or 1}")
    assert f"{old} is now {RENAMED[old]}" in said


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("model.norm={kind='rms', bias=true}", "model.norm.bias"),
        ("model.position={kind='learned', theta=1.0}", "model.position.theta"),
    ],
)
def test_a_key_of_another_kind_is_not_answered_with_itself(table, key):
    said = refusal(table)
    assert f"unknown key {key}" in said and f"did you mean {key}?" not in said


def test_a_key_of_two_lines_is_refused_in_one():
    assert "unknown key" in refusal("first\nsecond=1")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.steps=many", ["training.steps = 'many'", "integer"]),
        ("training.steps=0", ["training.steps = 0", "greater than 0"]),
        (f"training.batch={10**29}", [f"training.batch = {10**29}", "less than 2147483648"]),
        ("training.batch=1e29", ["training.batch = 1e+29", "integer"]),
        (f"training.batch={'1' * 5000}", ["training.batch = '111", "integer"]),
        ("model.d_model=2147483648", ["model.d_model = 2147483648", "less than 2147483648"]),
        ("model.num_layers=100001", ["model.num_layers = 100001", "less than or equal to 100000"]),
        ("mesh.fsdp=2147483648", ["mesh.fsdp = 2147483648", "less than 2147483648"]),
        ("training.steps=1.5", ["training.steps = 1.5", "integer"]),
        ("training.seed=-1", ["training.seed = -1", "0"]),
        ("training.dropout=1", ["training.dropout = 1", "less than 1"]),
        ("execution.dtype=float16", ["execution.dtype = 'float16'", "float32", "bfloat16"]),
        ("execution.remat=['query', 'up', 'query']", ["execution.remat", "lists query twice"]),
        ("execution.remat=some", ["execution.remat", "some", "none", "full", "query"]),
        ("execution.remat=['query', 'norm']", ["execution.remat", "norm", "attention"]),
        ("execution.remat=['up', 'gate']", ["execution.remat keeps gate,", "query, key, value, attention, up"]),
        ("training=5", ["training must be a section, [training]"]),
        ("execution.scan_layers=maybe", ["execution.scan_layers = 'maybe' must be true, false or 'auto'"]),
        ("execution.deterministic=maybe", ["execution.deterministic = 'maybe' must be true or false"]),
        ("execution.compiler_options=5", ["must be a table, [execution.compiler_options]"]),
        ("execution.compiler_options.xla_name=[1]", ["xla_name = [1] must be true, false, a number or a string"]),
        ("model=5", ["model must be a section", "[model]"]),
        ("optimizer.schedule=5", ["optimizer.schedule must be a section"]),
        ("model.norm=rms", ["model.norm must be a section"]),
        ("model.norm.kind=group", ["model.norm.kind = 'group'", "rms", "layer"]),
        ("model.position={kind='alibi'}", ["model.position.kind = 'alibi'", "learned", "rope"]),
        ("model.position.scaling={factor=2.0}", ["model.position.scaling.original_context_length is missing"]),
        ("model.position.fraction=1.5", ["model.position.fraction = 1.5", "less than or equal to 1"]),
        ("model.position.fraction=0.1", ["model.position.fraction = 0.1 of model.attention.head_dim", "must be even"]),
        (
            "model.position.scaling={factor=2.0, original_context_length=8, high_frequency_factor=1.0}",
            ["model.position.scaling", "high_frequency_factor must be larger than low_frequency_factor"],
        ),
        ("model.position.scaling={kind='ntk', factor=2.0}", ["position.scaling.kind = 'ntk'", "llama3", "yarn"]),
        (
            "model.position.scaling={kind='yarn', factor=2.0, original_context_length=8, beta_fast=1.0}",
            ["model.position.scaling", "beta_fast must be larger than beta_slow"],
        ),
        (
            "model.position={kind='rope', theta=1.0, scaling={kind='yarn', factor=2.0, original_context_length=8}}",
            ["model.position", "theta = 1: it must be above 1"],
        ),
        (
            "model.position.scaling={kind='longrope', factor=2.0, original_context_length=8, short_factors=[1.0], "
            "long_factors=[2.0]}",
            ["model.position.scaling.short_factors has 1 numbers", "channels of a head rotate"],
        ),
        (
            "model.position.scaling={kind='longrope', factor=2.0, original_context_length=8, short_factors=[1.0], "
            "long_factors=[]}",
            ["short_factors has 1 numbers, and long_factors 0"],
        ),
        ("model.attention.window={}", ["model.attention.window", "valid integer"]),
        ("model.attention.window=0", ["model.attention.window = 0", "greater than 0"]),
        ("model.scale=2.0", ["unknown key model.scale; did you mean model.attention.scale?"]),
        ("model.logit_soft_cap=0", ["model.logit_soft_cap = 0", "greater than 0"]),
        (
            "model.norm={kind='rms', plus_one=true, scale=false}",
            ["model.norm", "plus_one = true adds 1 to a parameter that scale = false leaves out"],
        ),
        ("model.norm={kind='layer', plus_one=true}", ["unknown key model.norm.plus_one", "model.norm.kind = 'rms'"]),
        ("model.feed_forward.activation=swiglu", ["model.feed_forward.activation = 'swiglu'", "silu"]),
        ("model.attention={}", ["model.attention.num_heads is missing"]),
        ("model.attention.num_heads=7", ["attention.num_heads = 7", "d_model = 256", "head_dim"]),
        ("model.attention.num_heads=7.5", ["model.attention.num_heads = 7.5", "integer"]),
        ("model.attention.num_heads='eight'", ["model.attention.num_heads = 'eight'", "integer"]),
        ("model.attention.num_kv_heads=3", ["attention.num_kv_heads = 3", "attention.num_heads = 8"]),
        ("model.attention.head_dim=31", ["attention.head_dim = 31", "even"]),
        ("model.num_layers=-2", ["model.num_layers = -2", "greater than 0"]),
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
        ("lora.targets=[]", ["lora.targets = [] must be a list of 1 or more"]),
        ("model.attention={kind='mamba2',num_heads=4,time_limits=[1]}", ["model.attention.time_limits[1] is missing"]),
        (
            "model.attention={kind='mamba2',num_heads=4,time_limits=[1,2,3]}",
            ["model.attention.time_limits = [1, 2, 3] must be a list of 2 at most"],
        ),
        ("training.ema_decay=1", ["training.ema_decay = 1", "less than 1"]),
        ("training.z_loss=-1", ["training.z_loss = -1", "greater than or equal to 0"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate = nan", "finite"]),
        ("optimizer.learning_rate=inf", ["optimizer.learning_rate = inf", "finite"]),
        ("optimizer.schedule.final_fraction=2", ["optimizer.schedule.final_fraction = 2", "1"]),
        ("data.text=[]", ["data.text", "no text", "stdlib"]),
        ("data.text=5", ["data.text = 5"]),
        ("data.held_out=1", ["data.held_out = 1", "less than 1"]),
        ("data.held_out=0.0", ["data.held_out = 0 leaves no held-out text", "validation"]),
        ("data.sources.web.text=a.txt", ["data.text and data.sources are both given", "[data.sources.NAME]"]),
        ("data.max_broken=1", ["data.max_broken = 1", "less than 1"]),
        ("data.documents=0", ["data.documents = 0", "greater than 0"]),
        ("data.tokenizer=gpt2", ["data.tokenizer", "gpt2", "bytes, characters, bpe", "tokenizer.json"]),
        ("mesh.fsdp=0", ["mesh.fsdp = 0", "greater than 0"]),
        ("mesh.fsdp=most", ["mesh.fsdp = 'most'", "all"]),
        ("training.sequence=257", ["training.sequence = 257", "model.context_length = 256"]),
        ("training.microbatches=3", ["training.microbatches = 3", "training.batch = 16", "1, 2, 4, 8, 16"]),
        ("mesh.tensor=3", ["mesh.tensor = 3", "model.attention.num_heads = 8", "1, 2, 4, 8"]),
        ("mesh.fsdp=3", ["mesh.fsdp = 3", "model.d_model = 256", "1, 2, 4, 8, 16"]),
        ("mesh.data=3", ["mesh.data = 3", "16 rows", "training.batch to 18"]),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_would_be_right(override, says):
    said = refusal(override)
    assert not [part for part in says if part not in said], said


def test_a_refusal_names_the_file_unless_the_command_line_gave_the_key(tmp_path):
    path = write(tmp_path / "mine.toml", "[evaluation]\nevery = 0\n")
    said = "evaluation.every = 0: input should be greater than 0"
    assert said in refusal(path=path) and str(path) in refusal(path=path)
    assert refusal("evaluation.every=0").startswith(said)


SIZES = {"vocab_size": 300, "context_length": 64, "num_layers": 2, "d_model": 96, "attention": {"num_heads": 4}}


@pytest.mark.parametrize("given", [(), ("vocab_size",), ("attention",), ("num_layers", "d_model", "context_length")])
def test_all_missing_keys_are_named_at_once(given, tmp_path):
    model = {"model": {name: SIZES[name] for name in given}} if given else {}
    said = refusal(path=write(tmp_path / "mine.toml", tomli_w.dumps(model)))
    missing = {"attention.num_heads" if name == "attention" else name for name in SIZES.keys() - set(given)}
    assert set(re.findall(r"model\.([\w.]+)", said.partition(": ")[2].partition(" missing")[0])) == missing
    assert ("jaxlm config --example" in said) == (not given)


def test_missing_keys_are_named_beside_unknown_and_wrong_ones(tmp_path):
    file = write(tmp_path / "mine.toml", "[model]\nvocab_size = 300\nnum_heads = 4\nnum_layers = 0\n")
    said = refusal(path=file)
    assert "unknown key model.num_heads; did you mean model.attention.num_heads?" in said
    assert "missing too: model.context_length, model.d_model and model.attention.num_heads" in said
    assert "(and 1 more)" in said


def test_a_wrong_table_is_named_before_missing_keys(tmp_path):
    said = refusal(path=write(tmp_path / "mine.toml", "training = 3\n"))
    assert ": training must be a section, [training] (missing too: model.vocab_size, " in said
    assert "schedule" not in said


def test_the_number_of_further_errors_is_said():
    assert "(and 1 more)" in refusal("training.batch=0", "training.seed=-1")


def test_all_unknown_keys_are_named():
    said = refusal("model.attention.dilation=2", "model.depth=2", "training.batch=0")
    keys = re.search(r"unknown key (\S+);.* \(unknown too: (\S+)\) \(and 1 more\)$", said)
    assert keys and {*keys.groups()} == {"model.attention.dilation", "model.depth"}


def test_bytes_need_their_vocabulary():
    said = refusal("data.tokenizer=bytes", "model.vocab_size=256")
    assert "model.vocab_size = 256" in said and "set model.vocab_size=257" in said
    assert load(SMALL, ["data.tokenizer=bytes", "model.vocab_size=257"]).model.vocab_size == 257


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
        (["mesh.tensor=8", "model.vocab_size=4097"], ["mesh.tensor=8", "model.vocab_size=4104"]),
        (["mesh.tensor=4", "model.feed_forward.d_ff=770"], ["model.feed_forward.d_ff=772"]),
    ],
    ids=str,
)
def test_the_number_that_a_refusal_names_is_accepted(wrong, right):
    said = refusal(*wrong)
    assert right[-1].partition("=")[2] in said.replace(",", " ").split()
    load(SMALL, right)


@pytest.mark.parametrize("override", ["model.attention.num_heads=8.0", "model.d_model='256'"])
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
    assert "optimizer.learning_rate: 1e+39 is not a number that float32 holds" in refusal(
        "optimizer.learning_rate=1e39"
    )


def test_a_seed_that_the_order_of_the_rows_cannot_take_is_refused():
    assert load(SMALL, [f"training.seed={2**32 - 1}"]).training.seed == 2**32 - 1
    assert "training.seed = 4294967296" in refusal(f"training.seed={2**32}")
