"""A run that is started again with other settings: refused, continued on request, or resumed where nothing depends on
them; never recorded as trained with what trained no step."""

import json
import tomllib
from types import SimpleNamespace

import pytest
import tomli_w
from runs import finish, losses, rows, start, untrained, write_config

from jaxlm import config
from jaxlm.config.run_name import default_run
from jaxlm.core.errors import InputError
from jaxlm.core.schema import sections_in
from jaxlm.data.tokenizers import bytes_tokenizer, characters_tokenizer
from jaxlm.runs.job_folder import JobFolder
from jaxlm.training.changes import is_by_content, is_free
from jaxlm.training.config import RunConfig


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run with a checkpoint of step 0."""
    return JobFolder(untrained(tmp_path_factory.mktemp("begun") / "run"))


OTHER_RUNS = {
    "optimizer.learning_rate=0.5": "optimizer.learning_rate = 0.0003, not 0.5",
    "optimizer.beta1=0.5": "optimizer.beta1 = 0.9, not 0.5",
    "optimizer.schedule.kind=constant": "optimizer.schedule.kind = cosine, not constant",
    "optimizer.groups=[{pattern='embedding', learning_rate_scale=0.0}]": "optimizer.groups = [], not [{'pattern'",
    "training.batch=16": "training.batch = 8, not 16",
    "training.sequence=16": "training.sequence = 32, not 16",
    "training.seed=1": "training.seed = 0, not 1",
    "execution.dtype=bfloat16": "execution.dtype = float32, not bfloat16",
    "training.dropout=0.2": "training.dropout = 0.1, not 0.2",
    "training.z_loss=0.1": "training.z_loss = 0.0, not 0.1",
    "model.initializer_std=0.1": "model.initializer_std = 0.02, not 0.1",
    "data.held_out=0.2": "data.held_out = 0.1, not 0.2",
    "data.documents=3": "no data.documents, not 3",
}
BOUND = {
    "model.d_model=64": "model.d_model = 32, not 64",
    "model.context_length=64": "model.context_length = 32, not 64",  # its positions are learned
    "model.norm.kind=rms": "model.norm.kind = layer, not rms",
    "optimizer.kind=lion": "optimizer.kind = adamw, not lion",
    "training.ema_decay=0.9": "no training.ema_decay, not 0.9",
}
SAME_RUN = [
    *("training.steps=80", "training.log_every=5", "training.max_skipped_in_a_row=3", "training.microbatches=2"),
    *("execution.remat=full", "execution.scan_layers=false", "execution.kernels=xla", "mesh.data=2"),
    *("execution.context_parallel=gather", "execution.pipeline_rounds=2", "execution.pipeline_gather=step"),
    *("evaluation.every=7", "evaluation.batches=3", "checkpoint.every=3", "checkpoint.keep=9"),
    *("inference.sequences=2", "inference.context=16", "inference.page=64", "inference.cache_memory=1GiB"),
    *("inference.length=8", "inference.prompt=8", "inference.chunk_tokens=64", "records.norms_every=5"),
    *("data.cache=elsewhere", "data.max_broken=0.5", "data.if_missing=ask"),
]


@pytest.mark.parametrize(("override", "named"), OTHER_RUNS.items(), ids=OTHER_RUNS)
def test_another_run_is_refused_with_the_ways_out(begun, override, named):
    changed = config.load(begun.paths.config, [override])
    with pytest.raises(InputError) as refused:
        begun.check(changed)
    assert f"{begun.paths} was trained with {named}" in str(refused.value)
    assert str(refused.value).endswith("; choose another --out, or go on in this one with --continue-with-changes")
    (change,) = begun.check(changed, continue_with_changes=True)
    assert named in str(change)


@pytest.mark.parametrize(("override", "named"), BOUND.items(), ids=BOUND)
def test_what_checkpoints_are_bound_to_is_refused_in_any_case(begun, override, named):
    for continued in (False, True):
        with pytest.raises(InputError) as refused:
            begun.check(config.load(begun.paths.config, [override]), continued)
        assert named in str(refused.value) and str(refused.value).endswith("bound to; choose another --out")


@pytest.mark.parametrize("override", SAME_RUN)
def test_what_changes_no_step_is_returned_and_goes_through(begun, override):
    (change,) = begun.check(config.load(begun.paths.config, [override]))
    assert change.key == override.partition("=")[0]


def test_all_changed_keys_are_named(begun):
    changed = config.load(begun.paths.config, ["training.seed=1", "training.dropout=0.2", "training.log_every=7"])
    with pytest.raises(InputError, match="training.dropout = 0.1, not 0.2; training.seed = 0, not 1; choose"):
        begun.check(changed)


def test_more_steps_under_a_schedule_that_ends_with_them_are_another_run(tmp_path):
    """The message gives a command that keeps the schedule in the same folder."""
    file = tmp_path / "x.toml"
    resolved = tomllib.loads(write_config(tmp_path).read_text())
    del resolved["optimizer"]["schedule"]["decay_steps"]
    file.write_text(tomli_w.dumps(resolved))
    run = JobFolder(tmp_path / "run")
    run.open(config.load(file), SimpleNamespace(tokenizer=bytes_tokenizer(), digest="one", held_out_bytes=1))
    more = "training.steps=80"
    with pytest.raises(InputError) as refused:
        run.check(config.load(file, [more]))
    assert str(refused.value) == (
        f"the schedule of {run} ends at step 40, and optimizer.schedule.decay_steps follows from training.steps, which "
        f"is 80 now: `jaxlm train {run} {more}` keeps the schedule, --continue-with-changes lets it end at step 80; or "
        "choose another --out"
    )
    again = config.load(run.paths.directory, [more])
    run.check(again)
    assert again.optimizer.schedule.decay_steps == 40
    assert default_run(run.paths.directory, [more], again) == run.paths.directory
    run.check(config.load(file, [more]), continue_with_changes=True)


def test_only_listed_keys_are_free():
    """Every other one makes another run."""
    for key in SAME_RUN:
        assert is_free(key.partition("=")[0])
    assert is_by_content("data.sources.web.text") and not is_by_content("data.sources.web.weight")
    assert not is_free("optimizer.learning_rate") and not is_free("a key that is yet to be added")


def data(digest, tokenizer=None):
    return SimpleNamespace(tokenizer=tokenizer or bytes_tokenizer(), digest=digest, held_out_bytes=1)


def test_other_text_is_another_run_whatever_its_path(tmp_path):
    run = JobFolder(untrained(tmp_path / "run"))
    run.paths.data.write_text(json.dumps({"digest": "one", "held_out_bytes": 1}))
    moved = config.load(run.paths.config, ["data.text=moved"])
    run.open(moved, data("one"))
    with pytest.raises(InputError, match="not \\['moved'\\]; choose another --out, or go on"):
        run.open(moved, data("two"))
    run.open(moved, data("two"), continue_with_changes=True)
    assert run.digest() == "one"  # until a step is trained on the other
    with pytest.raises(InputError, match="another tokenizer; set data.tokenizer=.*/run/tokenizer.json, or choose"):
        run.open(moved, data("two", characters_tokenizer("ab")), continue_with_changes=True)
    run.record(moved, data("two"), 7)
    assert run.digest() == "two" and run.experiment() == moved


def test_the_record_keeps_which_configuration_trained_which_steps(tmp_path):
    run = JobFolder(untrained(tmp_path / "run"))
    first = run.experiment()
    second, third = (config.load(run.paths.config, [f"optimizer.learning_rate={rate}"]) for rate in (0.5, 0.25))

    def history():
        return [
            (row["step"], row["config"]["optimizer"]["learning_rate"])
            for row in rows(tmp_path / "run", "history.jsonl")
        ]

    run.record(first, data("one"), 1)
    run.record(first, data("one"), 5)  # a start that resumed
    assert history() == [(1, 3e-4)]
    run.record(second, data("one"), 7)
    assert history() == [(1, 3e-4), (7, 0.5)] and run.experiment() == second
    run.record(third, data("one"), 7)  # the steps from 7 on were lost with the process
    assert history() == [(1, 3e-4), (7, 0.25)] and run.experiment() == third
    run.record(first, data("one"), 7)
    assert history() == [(1, 3e-4)] and run.experiment() == first


def test_a_run_of_before_there_was_a_history_keeps_its_configuration(tmp_path):
    run = JobFolder(untrained(tmp_path / "run"))
    second = config.load(run.paths.config, ["optimizer.learning_rate=0.5"])
    run.record(second, data("one"), 7)
    assert [row["step"] for row in rows(tmp_path / "run", "history.jsonl")] == [1, 7]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_is_continued_with_changes_and_says_from_which_step(tmp_path, tmp_path_factory):
    small = write_config(tmp_path_factory.mktemp("text"), "training.steps=6", "optimizer.schedule.kind=constant")
    run = tmp_path / "run"
    finish(start(small, run))
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    _, errors = finish(start(small, run, "optimizer.learning_rate=0.5"), status=2)
    assert "optimizer.learning_rate = 0.0003, not 0.5" in errors.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before

    changed = ("optimizer.learning_rate=0.5", "--continue-with-changes")
    _, errors = finish(start(small, run, *changed))
    assert "no step was left to train" in errors and (run / "config.toml").read_bytes() == before["config.toml"]

    _, errors = finish(start(small, run, *changed, "training.steps=8"))
    assert "resumed with optimizer.learning_rate = 0.5, before 0.0003" in errors
    assert "resumed with training.steps = 8, before 6" in errors
    assert tomllib.loads((run / "config.toml").read_text())["optimizer"]["learning_rate"] == 0.5
    history = [(row["step"], row["config"]["optimizer"]["learning_rate"]) for row in rows(run, "history.jsonl")]
    assert history == [(1, 3e-4), (7, 0.5)]
    assert {row["step"]: row["learning_rate"] for row in rows(run)}[8] == pytest.approx(0.5)
    assert list(losses(run)) == [*range(1, 9)]


def test_the_default_folder_tells_overrides_apart(tmp_path):
    file = write_config(tmp_path)  # its schedule ends at a step of its own

    def name(*overrides):
        return default_run(file, overrides, config.load(file, overrides)).as_posix()

    assert name() == name("training.log_every=3", "mesh.data=2", "training.steps=41") == "runs/tiny"
    assert name("training.batch=16", "optimizer.learning_rate=0.5") == "runs/tiny,learning_rate=0.5,batch=16"
    assert name("optimizer.learning_rate=5e-1", "training.batch=16") == "runs/tiny,learning_rate=0.5,batch=16"
    assert name("optimizer.kind=muon", "model.norm.kind=rms") == "runs/tiny,norm=rms,optimizer=muon"
    longer = name("training.steps=50", "optimizer.schedule.decay_steps=50")  # where the schedule ends with them
    assert longer == "runs/tiny,schedule.decay_steps=50,steps=50"
    texts = {name(f"data.text={path}") for path in ("a/b", "a?b", "a-b", "ä", "x" * 300, "x" * 301)}
    assert len(texts) == 6 and all(len(text) < 130 and set(text).isdisjoint("?*[]ä\\") for text in texts)
    assert name("data.text=a/b").startswith("runs/tiny,text=a-b,")
    assert default_run(tmp_path, (), config.load(file)) == tmp_path  # a run folder
    begun = default_run(file, ["training.batch=16"], config.load(file), "hf:ORG/base-8B")
    assert begun.name == f"{file.stem},batch=16,from=base-8B"


def test_an_override_with_the_value_of_the_file_makes_no_other_run(tmp_path):
    file = write_config(tmp_path)
    before = config.load(file)
    same = ["training.batch=8", "optimizer.kind=adamw", "training.z_loss=0", "model.attention.num_kv_heads=4"]
    assert [before.training.batch, before.model.attention.num_kv_heads] == [8, 4]

    def name(*overrides):
        return default_run(file, overrides, config.load(file, overrides)).as_posix()

    assert name(*same) == name() == "runs/tiny"
    assert name(*same, "training.batch=16") == name("training.batch=16") == "runs/tiny,batch=16"
    assert name("model.attention={num_heads=2}") != name()


def test_a_run_of_an_earlier_default_keeps_it(tmp_path):
    """Keep it where the configuration does not give the key: a value that is given counts, today's default too."""
    file = tmp_path / "mine.toml"
    values = tomllib.loads(write_config(tmp_path).read_text())
    del values["data"]["held_out"], values["execution"]["scan_layers"]
    file.write_text(tomli_w.dumps(values))
    run = JobFolder(tmp_path / "run")
    run.paths.directory.mkdir()
    now = config.load(file)
    assert now.data.held_out is None and run.with_former_defaults(now) == now  # a new run
    for recorded, expected in (("0.1", 0.1), ("0.2", None)):
        run.paths.config.write_text(config.load(file, [f"data.held_out={recorded}"]).to_toml())
        assert run.with_former_defaults(now).data.held_out == expected
        given = config.load(file, ["data.held_out=0.3"])
        assert run.with_former_defaults(given) == given
    for recorded, expected in ((True, True), (False, "auto"), ("auto", "auto")):
        run.paths.config.write_text(config.load(file, [f"execution.scan_layers={recorded}".lower()]).to_toml())
        assert run.with_former_defaults(now).execution.scan_layers == expected
        given = config.load(file, ["execution.scan_layers=auto"])
        assert run.with_former_defaults(given).execution.scan_layers == "auto"


def test_short_names_of_keys_are_of_one_key_each():
    """Sections are left out of the name of a folder."""
    found: dict[str, set[str]] = {}
    for section, field in RunConfig.model_fields.items():
        for kind in sections_in(field.annotation):
            for name in kind.model_fields:
                if name != "kind" and not is_free(f"{section}.{name}"):
                    found.setdefault(name, set()).add(section)
    assert all(len(sections) == 1 for sections in found.values()), found
