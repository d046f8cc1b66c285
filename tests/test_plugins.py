"""Plug-ins: parts in a file of one's own, in every command; what a run records, and what is never imported."""

import hashlib
import importlib
import json
import math
import shutil
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import optax
import pytest
from workload_fixtures import workload

from jaxlm import api, config
from jaxlm.cli import main
from jaxlm.core import plugins
from jaxlm.core.errors import InputError
from jaxlm.costs.counted import memory, operations
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.hardware import catalog
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.workload import Workload
from jaxlm.data import parallel, tokenizer_training
from jaxlm.training import optimizer
from jaxlm.training.config import ConstantScheduleConfig, OptimizerConfig
from jaxlm.training.step import TrainStep

OWN = Path(__file__).with_name("own_parts.py")
CONFIG = """
import = ["mine.py"]
[model]
vocab_size = 128
context_length = 32
num_layers = 2
d_model = 32
norm = {kind = "dynamic_tanh"}
position = {kind = "rope"}
attention = {kind = "gqa", num_heads = 2}
feed_forward = {kind = "squared", inner_dim = 48}
[data]
text = "texts/*.txt"
tokenizer = "words"
held_out = 0.2
[execution]
dtype = "float32"
[training]
steps = 4
batch = 8
log_every = 1
[optimizer]
kind = "signum"
schedule = {kind = "constant"}
[objective]
kind = "focal"
[records]
tensorboard = false
sample_tokens = 0
"""


def forget():
    """Take out all parts that a plug-in registered, and forget that it was imported."""
    for name in [name for name in sys.modules if name.startswith("jaxlm_plugin_")]:
        module = sys.modules.pop(name)
        with suppress(KeyError, ValueError, AttributeError):
            module.unregister()
    plugins.begin(())


@pytest.fixture(scope="module", autouse=True)
def nothing_stays():
    yield
    forget()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A user's folder with a plug-in, a configuration, text and a run of both."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(OWN, folder / "mine.py")
    (folder / "mine.toml").write_text(CONFIG)
    (folder / "texts").mkdir()
    for number in range(40):
        text = f"once upon a time fox number {number} saw {number % 7} geese and ran to the river again"
        (folder / "texts" / f"{number}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        meshes.have(patch, 1)
        assert main(["train", "mine.toml", "--out", "run"]) == 0
    return folder


@pytest.fixture
def here(home, monkeypatch):
    """The user's folder as the current one, with the plug-in as it was."""
    monkeypatch.chdir(home)
    meshes.have(monkeypatch, 1)
    shutil.copy(OWN, home / "mine.py")
    forget()
    return home


@pytest.fixture
def said(capfd):
    """Return a function that runs a command that succeeds, and returns what it prints."""

    def said(*arguments):
        capfd.readouterr()
        status = main(list(map(str, arguments)))
        out, errors = capfd.readouterr()
        assert status == 0, errors
        return out

    return said


@pytest.fixture
def refused(capfd):
    """Return a function that runs a command that is refused, and returns its one line."""

    def refused(*arguments):
        capfd.readouterr()
        assert main(list(map(str, arguments))) == 2
        (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("jaxlm: ")]
        return line

    return refused


def test_a_run_records_its_plugins_and_is_trained_by_their_parts(here):
    recorded = tomllib.loads((here / "run" / "config.toml").read_text())
    (plugin,) = recorded["import"]
    name, _, digest = plugin.partition("#sha256=")
    assert name == str(here.resolve() / "mine.py") and len(digest) == 64
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] < rows[0]["cross_entropy"]  # the focal loss is the smaller
    evaluated = json.loads((here / "run" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert evaluated["loss"] == pytest.approx(rows[-1]["cross_entropy"], rel=0.1)  # of runs that can be compared
    assert '"fox"' in (here / "run" / "tokenizer.json").read_text()


def test_every_command_has_the_parts_of_a_run(here, said, tmp_path):
    """Without that they are named again."""
    trained = json.loads(said("train", "mine.toml", "training.steps=6", "--out", "run", "--json").splitlines()[-1])
    assert trained["step"] == 6
    assert json.loads(said("eval", "run", "--json"))["step"] == 6
    assert json.loads(said("generate", "run", "--prompt", "once upon", "--max-tokens", "3", "--json"))["token_ids"]
    assert json.loads(said("plan", "run", "--on", "own-npu", "--json"))["chips"] == 1
    assert "signum" in said("config", "optimizer", "--import", "mine.py")
    assert "no key differs" in said("compare", "run", "run")
    assert [run["step"] for run in json.loads(said("runs", ".", "--json"))["runs"]] == [6]
    begun = tmp_path / "begun"
    said("train", "mine.toml", "training.steps=1", "--from", "run", "--out", begun)
    assert api.load(begun).config.norm.kind == "dynamic_tanh"


def test_a_part_is_named_by_messages(here, refused):
    assert "unknown key model.norm.alfa; did you mean model.norm.alpha?" in refused(
        "train", "mine.toml", "model.norm.alfa=1"
    )
    assert "model.norm.kind = 'group' is none of 'rms', 'layer', 'dynamic_tanh'" in refused(
        "train", "mine.toml", "model.norm={kind='group'}"
    )
    assert "training.z_loss = 0.1 is no part of objective.kind = 'focal'" in refused(
        "train", "mine.toml", "training.z_loss=0.1"
    )


def test_a_chip_is_had_from_a_plugin_alone(here, said):
    assert json.loads(said("hardware", "own-npu", "--import", "mine.py", "--json"))["rows"][0]["watts"] == 100
    assert "own-npu" in said("plan", "quickstart", "--on", "own-npu", "--import", "mine.py")


def test_a_step_is_counted_to_the_last_flop_and_byte(here):
    """Its matrix products, the FLOPs of the norm, and the optimizer's state."""
    experiment = config.load("mine.toml", ["execution.kernels=xla"])
    steps, work = TrainStep.of(experiment), Workload.of(experiment)
    shape = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    state = jax.eval_shape(steps.init)
    counted = sum(op.times * op.flops for op in operations.step(work))
    assert counted == count(steps.train, state, batch).matmul_flops
    kept = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim)
    assert memory.memory(work).optimizer == kept > 0
    step = device_step(work)
    use = next(use for use in step.recording.uses if use.scope.endswith("attention_norm"))
    forward = next(operations.passes(step, use)).forward
    assert forward.flops == 4 * 8 * 32 * 32  # α x, tanh, and a scale and a bias of each number


class HistoryConfig(OptimizerConfig):
    kind: Literal["history"] = "history"


def test_what_an_optimizer_keeps_is_counted_whatever_it_is():
    """A moment in another dtype, sharded as the parameters are, and an array that every device keeps whole."""

    def init(parameters):
        moment = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters)
        return {"history": jnp.zeros(1000), "moment": moment}

    transform = optax.GradientTransformation(init, lambda updates, state, parameters=None: (updates, state))
    optimizer.register(HistoryConfig, lambda settings, dimensions: transform)
    try:
        work = workload("train", model_fixtures.model(), 8, model_fixtures.CONTEXT, optimizer="sgd")
        own = HistoryConfig(schedule=ConstantScheduleConfig())
        for layout in (meshes.layout(), meshes.layout(1, 4)):
            of_sgd = operations.optimizer_bytes(replace(work, layout=layout))
            assert operations.optimizer_bytes(replace(work, layout=layout, optimizer=own)) == 4000 + of_sgd // 2
    finally:
        optimizer.unregister(HistoryConfig)


def test_a_tokenizer_that_no_file_holds_is_refused(here, refused):
    tokenizer_training.register("none", lambda texts, vocabulary: len(list(texts)))
    try:
        assert "data.tokenizer = 'none' gives a int; return a tokenizers.Tokenizer" in refused(
            "train", "mine.toml", "data.tokenizer=none", "--out", "none"
        )
    finally:
        tokenizer_training.unregister("none")


def _chip():
    figures = {"name": "x", "vendor": "x", "kind": "asic", "memory_bytes": 1, "memory_bytes_per_s": 1.0}
    return {**figures, "sources": {"https://mine.example": ["memory_bytes", "memory_bytes_per_s"]}}


def test_a_chip_is_checked():
    with pytest.raises(InputError, match=r"a registered chip, \[own\] watts: input should be greater than 0"):
        catalog.register("own", {**_chip(), "watts": 0})
    for taken in ("host", "a100-sxm4-80g", "h100"):
        with pytest.raises(ValueError, match=f"'{taken}' is another chip of the catalog"):
            catalog.register(taken, _chip())


def test_processes_that_read_text_find_the_file(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text("def twice(number):\n    return 2 * number\n")
    plugins.load("small.py", tmp_path, "here")
    (module,) = [module for module, file in plugins.files().items() if file.endswith("small.py")]
    monkeypatch.setattr(parallel, "usable_cores", lambda: 2)
    assert list(parallel.in_order(sys.modules[module].twice, [1, 2])) == [2, 4]


def test_a_missing_plugin_is_said_and_may_be_given_under_another_name(here, refused, said, tmp_path):
    (here / "mine.py").rename(tmp_path / "moved.py")
    line = refused("generate", "run", "--prompt", "fox")
    assert f"run needs the plug-in {here.resolve() / 'mine.py'}, which is not there" in line and "--import PATH" in line
    for command in (["plan", "run", "--on", "own-npu"], ["eval", "run"], ["train", "run"]):
        assert refused(*command) == line
    assert "no key differs" in said("compare", "run", "run")  # what it needs is on record
    forget()
    assert json.loads(said("eval", "run", "--import", tmp_path / "moved.py", "--json"))["tokens"]


def test_a_changed_plugin_is_said_and_may_be_accepted(here, refused, said):
    with (here / "mine.py").open("a") as file:
        file.write("# another\n")
    assert "mine.py has changed since; put it back, or accept it as it is: --import" in refused("eval", "run")
    assert json.loads(said("eval", "run", "--import", "mine.py", "--json"))["tokens"]
    shutil.copytree("run", "changed")
    said("train", "mine.toml", "training.steps=9", "--out", "changed")  # it names the file
    first, last = _imports("changed")
    assert first != last == tomllib.loads(Path("changed/config.toml").read_text())["import"]


def _imports(run):
    rows = [json.loads(line) for line in Path(run, "history.jsonl").read_text().splitlines()]
    return rows[0]["config"]["import"], rows[-1]["config"]["import"]


def test_nothing_is_imported_for_a_run_whose_plugin_nobody_named_here(here, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    assert "which you have not imported yet; read it, then give --import" in refused("eval", "run")
    assert not [name for name in sys.modules if name.startswith("jaxlm_plugin_")]


def test_a_program_may_import_the_file_itself(here, monkeypatch):
    """Before or after a run does."""
    monkeypatch.syspath_prepend(here)
    try:
        mine = importlib.import_module("mine")
        assert type(api.load("run").config.norm) is mine.DynamicTanhConfig
        mine.unregister()
        del sys.modules["mine"]
        forget()
        assert api.load("run").config.norm.kind == "dynamic_tanh"
        mine = importlib.import_module("mine")
        assert type(api.load("run").config.norm) is mine.DynamicTanhConfig
    finally:
        mine.unregister()
        sys.modules.pop("mine", None)


def test_a_kind_that_a_program_registered_is_asked_for(here, refused, tmp_path):
    """Its run records no plug-in."""
    shutil.copytree("run", tmp_path / "run")
    text = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(text[text.index("# dpo") :])
    line = refused("eval", tmp_path / "run")
    assert "model.norm.kind = 'dynamic_tanh' is none of 'rms', 'layer'" in line
    assert "where a plug-in registers it, give that: --import MODULE" in line


EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("evil.py", "needs the plug-in evil.py, which is not there"),
        ("ABSOLUTE/evil.py", "the folder of a model, from which no code is imported"),
        ("ABSOLUTE/evil.py#sha256=DIGEST", "the folder of a model, from which no code is imported"),
        ("../beside/evil.py", "which is not there"),
        ("ABSOLUTE/../beside/evil.py#sha256=DIGEST", "which you have not imported yet"),
        ("evil_module", "which you have not imported yet"),
        ("evil_package.inner", "which you have not imported yet"),
        ("antigravity", "which you have not imported yet"),
    ],
)
@pytest.mark.parametrize("command", ["eval", "train", "plan", "export", "--from"])
def test_nothing_is_imported_that_a_model_names(here, refused, monkeypatch, tmp_path, command, named, says):
    """Neither of its own folder, nor beside it, nor on Python's path."""
    run, beside, path = tmp_path / "run", tmp_path / "beside", tmp_path / "path"
    shutil.copytree("run", run)
    for file in (run / "evil.py", beside / "evil.py", path / "evil_module.py", path / "evil_package" / "__init__.py"):
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(EVIL)
    shutil.copy(path / "evil_module.py", path / "evil_package" / "inner.py")
    monkeypatch.syspath_prepend(path)
    named = named.replace("ABSOLUTE", str(run)).replace("DIGEST", hashlib.sha256(EVIL.encode()).hexdigest())
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(f"import = [{json.dumps(named)}]\n" + text[text.index("# dpo") :])
    arguments = {"plan": ("plan", run, "--on", "own-npu"), "export": ("export", run, tmp_path / "hf")}
    arguments["--from"] = ("train", "mine.toml", "--from", run, "--out", tmp_path / "begun")
    assert says in refused(*arguments.get(command, (command, run)))
    assert not list(tmp_path.rglob("executed")) and "antigravity" not in sys.modules


def test_a_file_in_the_folder_of_a_model_is_not_imported_for_anyone(here, refused, tmp_path):
    for make in (_published, _adapters, _of_safetensors):
        folder = make(tmp_path / make.__name__)
        (folder / "code").mkdir()
        (folder / "code" / "evil.py").write_text(EVIL)
        (folder / "train.toml").write_text(CONFIG.replace("mine.py", "code/evil.py"))
        assert "no code is imported" in refused("config", "--import", folder / "code" / "evil.py")
        assert "which is not there" in refused("train", folder / "train.toml")
        (tmp_path / "link.py").unlink(missing_ok=True)
        (tmp_path / "link.py").symlink_to(folder / "code" / "evil.py")
        assert "no code is imported" in refused("config", "--import", tmp_path / "link.py")
    assert not list(tmp_path.rglob("executed"))


def _published(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def _adapters(folder):
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def _of_safetensors(folder):
    folder.mkdir()
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize(
    ("content", "named", "says"),
    [
        (None, "none.py", "--import: there is no plug-in none.py: no such file; give the path of its .py file"),
        (None, "no_such_module", "there is no plug-in no_such_module: no such module on Python's path, nor a file"),
        (None, "a b", "'a b' is no plug-in; give the name of a module, or the path of a .py file"),
        ("1 / 0", "own.py", "cannot be imported: ZeroDivisionError: division by zero (own.py, line 1)"),
        ("def (", "own.py", "cannot be imported: SyntaxError: invalid syntax (own.py, line 1)"),
        (
            "from jaxlm.models import norms\n\n\nclass C:\n    pass\n\n\nnorms.register(C, None)\n",
            *("own.py", "ValueError: C must derive from NormConfig (own.py, line 8)"),
        ),
        ("import not_installed", "own.py", "cannot be imported: ModuleNotFoundError: No module named 'not_installed'"),
        ("", "own.py#sha256=00", "is not the plug-in own.py#sha256=00: its SHA-256 is"),
    ],
)
def test_what_cannot_be_imported_is_said_in_a_line(tmp_path, monkeypatch, refused, content, named, says):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("own.py").write_text(content)
    line = refused("runs", "--import", named).replace(f"({tmp_path}/", "(")
    assert says in line and line.count(", line ") <= 1


def test_a_package_beside_a_file_is_found_by_its_name(tmp_path, monkeypatch, said):
    """And the digest is of all its files."""
    package = tmp_path / "parts"
    package.mkdir()
    (package / "__init__.py").write_text("from .values import VALUE\n")
    (package / "values.py").write_text("VALUE = 1\n")
    monkeypatch.chdir(tmp_path)
    before = plugins.load("parts", Path(), "here")
    (package / "values.py").write_text("VALUE = 2\n")
    after = plugins.load("parts", Path(), "here")
    assert before.name == after.name and before.digest != after.digest and after.short == "parts"
    (module,) = [module for module, file in plugins.files().items() if "/parts/" in file]
    assert sys.modules[module].VALUE == 2


def test_keys_are_not_overridden_by_plugins(here, refused):
    assert "import names plug-ins in a file; here give --import MODULE" in refused(
        "train", "mine.toml", "import=mine.py"
    )
    Path("odd.toml").write_text(CONFIG.replace('["mine.py"]', "5"))
    assert 'odd.toml: import = 5 must be a list of names, such as ["mine.py"]' in refused("train", "odd.toml")


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Return a function that installs a distribution whose entry point is a module with this content."""

    def install(content):
        info = tmp_path / "own_norms-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-norms\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[jaxlm.plugins]\nnorms = own_norms\n")
        (tmp_path / "own_norms.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(plugins, "_installed", None)

    yield install
    sys.modules.pop("own_norms", None)


def test_an_installed_plugin_is_imported_without_being_named(here, distribution, said, monkeypatch):
    forget()
    distribution(OWN.read_text())
    Path("installed.toml").write_text(CONFIG.replace('import = ["mine.py"]', ""))
    experiment = config.load("installed.toml")
    try:
        assert getattr(experiment, "import") == ("own_norms",)
        run = Path("installed")
        said("train", "installed.toml", "training.steps=1", "--out", run)
        assert 'import = [\n    "own_norms",\n]' in (run / "config.toml").read_text()
        assert api.load(run).config.norm.kind == "dynamic_tanh"
        monkeypatch.setattr(plugins, "_installed", [])  # on a machine without it
        with pytest.raises(InputError, match="installed needs the plug-in own_norms, which you have not imported yet"):
            api.load(run)
    finally:
        sys.modules["own_norms"].unregister()


def test_an_installed_plugin_that_is_broken_is_named(distribution, refused):
    distribution("1 / 0")
    assert "the plug-in norms of own-norms 1.2 cannot be imported: ZeroDivisionError" in refused("hardware")
