"""Bad input is one line on standard error and status 2; nothing on standard output, nothing written."""

import errno
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from matrices import sampled

from jaxlm.cli import main
from jaxlm.config import load
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware import calibration
from jaxlm.data.tokenizers import bytes_tokenizer, characters_tokenizer
from jaxlm.runs.folder import Run
from jaxlm.runs.job_folder import JobFolder

CONFIG = """
[model]
vocab_size = 264
context_length = 32
num_layers = 1
d_model = 32
norm = {kind = "rms"}
position = {kind = "rope"}
attention = {num_heads = 4}
feed_forward = {d_ff = 64, activation = "silu"}
[data]
text = "text.txt"
tokenizer = "bytes"
[training]
steps = 1
batch = 8
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with good and bad files; a cache would be made in it."""
    (tmp_path / "good.toml").write_text(CONFIG)
    (tmp_path / "broken.toml").write_text("[model\n")
    (tmp_path / "deep.toml").write_text("x = " + "[" * 5000)
    (tmp_path / "text.txt").write_text("some words to learn from\n" * 100)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_text("none")
    (tmp_path / "garbage.json").write_text("garbage")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "letter.md").write_text("not a run")
    (tmp_path / "config_alone").mkdir()
    (tmp_path / "config_alone" / "config.toml").write_text(CONFIG)
    (tmp_path / "other_config").mkdir()
    (tmp_path / "other_config" / "config.toml").write_text("[tool]\nname = 'other'\n")
    run = tmp_path / "run"  # as one that was interrupted before its first checkpoint
    run.mkdir()
    (run / "config.toml").write_text(load(tmp_path / "good.toml").to_toml())
    (run / "data.json").write_text(json.dumps({"digest": "another", "held_out_bytes": 100}))
    bytes_tokenizer().save(run / "tokenizer.json")
    shutil.copytree(run, tmp_path / "crossed")
    characters_tokenizer(map(chr, range(300))).save(tmp_path / "crossed" / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def unmeasured(monkeypatch):
    """A run that gets so far would measure this machine first, for longer."""
    monkeypatch.setattr(calibration, "ensure", lambda say: None)


def files(place: Path) -> dict:
    """Read all files except locks and scan logs: a scan that was refused is reused once the input is fixed."""
    cache = place / "cache"
    kept = [cache, cache / "jaxlm", *(cache / "jaxlm" / name for name in ("locks", "scans"))]
    found = (path for path in place.rglob("*") if path not in kept and path.parent not in kept[2:])
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def check(status: int, out: str, error: str, says: list[str]) -> None:
    assert (status, out) == (2, "")
    assert error.startswith("jaxlm: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert not [part for part in says if part not in error], error


ARGUMENTS = {
    "no command": ("", ["COMMAND"]),
    "misspelt command": ("trian good.toml", ["no command 'trian'", "did you mean train?"]),
    "unknown command": ("deploy run", ["deploy", "train", "serve"]),
    "no config": ("train", ["CONFIG"]),
    "unknown option": ("train good.toml --outt x", ["--outt", "--help"]),
    "config without a name": ("train ''", ["CONFIG", "'' is no path"]),
    "out without a name": ("train good.toml --out ''", ["--out", "'' is no path"]),
    "out that is not UTF-8": ("train good.toml --out w\udce9", ["--out", "not UTF-8"]),
    "out in no bucket": ("train good.toml --out gs://", ["--out", "gs://BUCKET/FOLDER"]),
    "picture in a bucket": ("plan good.toml --on h200-sxm --plot s3://b/a.png", ["--plot", "'s3://b/a.png'", "here"]),
    "picture without a name": ("plan good.toml --on h200-sxm --plot ''", ["--plot", "'' is no path"]),
    "no run": ("eval", ["RUN"]),
    "no prompt and one object": ("generate run --json", ["--json", "--prompt", "--token-ids"]),
    "two prompts": ("generate run --prompt a --token-ids 1", ["--prompt", "--token-ids"]),
    "text and tasks": ("eval run --data text.txt --tasks hellaswag", ["--data", "--tasks"]),
    "limit without tasks": ("eval run --limit 3", ["--limit", "--tasks"]),
    "examples without tasks": ("eval run --num-fewshot 3", ["--num-fewshot", "--tasks"]),
    "unknown checkpoint": ("eval run --checkpoint oldest", ["oldest", "newest", "best"]),
    "temperature that is no number": ("generate run --prompt a --temperature hot", ["hot"]),
    "seed that is no number": ("generate run --prompt a --seed x", ["--seed", "x"]),
}
CONFIGURATIONS = {
    "missing config": ("train missing.toml", ["missing.toml"]),
    "misspelt name": ("plan llama3-8b --on h200-sxm", ["neither a file nor one of", "did you mean llama3.1-8b?"]),
    "name with a path's mistake": ("train configs/quickstart.toml", ["did you mean quickstart?"]),
    "config that is not TOML": ("train broken.toml", ["broken.toml", "not TOML"]),
    "config of too many brackets": ("train deep.toml", ["deep.toml", "too many brackets"]),
    "override of too many brackets": (f"train good.toml training.steps={'[' * 3000}", ["training.steps", "brackets"]),
    "override that is not UTF-8": ("train good.toml data.text=caf\udce9.txt", ["not UTF-8"]),
    "two overrides in one": ("plan good.toml --on h200-sxm 'training.steps=5\ntraining.batch=9'", ["by itself"]),
    "batch whose divisors are many to try": (
        "train good.toml training.batch=2147483646 training.microbatches=4",
        ["training.batch = 2147483646", "1, 2, 3, 6, 7, 9"],
    ),
    "average that is all of the past": (
        "train good.toml optimizer.beta1=0.99999999999",
        ["optimizer.beta1", "1 in float32", "0.9999999"],
    ),
    "number that float32 does not hold": ("train good.toml model.attention.scale=1e308", ["scale: 1e+308", "3.4e38"]),
    "number that float32 takes for nothing": (
        "train good.toml model.norm.epsilon=1e-46",
        ["epsilon: 1e-46", "1.2e-38"],
    ),
    "warmup that no run would end": ("train good.toml optimizer.schedule.warmup_steps=2147483648", ["warmup_steps"]),
    "iterations that no compiler would end": (
        "train good.toml optimizer.kind=muon optimizer.iterations=1000000",
        ["optimizer.iterations", "100"],
    ),
    "cache without a name": ("train good.toml data.cache=", ["data.cache", "at least 1 character"]),
    "source without a field": (
        """train good.toml 'data.sources={a={text="text.txt", field=""}}'""",
        ["data.sources.a.field", "at least 1 character"],
    ),
    "project without a name": ("train good.toml records.wandb_project=", ["records.wandb_project", "at least 1"]),
    "config that is a directory": ("train foreign", ["foreign"]),
    "unknown key": ("train good.toml training.step=3", ["training.step", "training.steps"]),
    "no override": ("train good.toml steps", ["'steps'", "key=value"]),
    "mesh that does not divide": (
        "train good.toml mesh.tensor=3",
        ["mesh.tensor = 3", "heads = 4", "1, 2, 4"],
    ),
    "mesh larger than the batch": (
        "train good.toml mesh.data=16",
        ["= 16", "8 rows", "training.batch to 16"],
    ),
    "profile that is no range": ("train good.toml --profile 3", ["--profile '3'", "START:STOP"]),
    "profile of a variable that is not set": ("train good.toml --profile ''", ["--profile ''", "START:STOP"]),
    "process of a variable that is not set": ("train good.toml --process ''", ["--process ''", "INDEX/COUNT"]),
    "profile that is backwards": ("train good.toml --profile 5:2", ["--profile '5:2'", "START < STOP"]),
    "profile after the end": ("train good.toml --profile 5:6", ["--profile 5:6", "training.steps = 1"]),
    "steps that are none": ("train good.toml training.steps=-1", ["training.steps = -1", "greater than 0\n"]),
    "two mistakes": ("train good.toml training.steps=-1 training.batch=0", ["(and 1 more)"]),
    "context that is none": (
        "train good.toml model.context_length=-1",
        ["model.context_length = -1", "greater than 0\n"],
    ),
    "hours without end": ("train good.toml --max-hours inf", ["--max-hours inf", "a finite number above 0"]),
    "no hours": ("train good.toml --max-hours 0", ["--max-hours 0", "above 0"]),
    "hours that are no number": ("train good.toml --max-hours nan", ["--max-hours nan", "above 0"]),
    "process that is not a spec": (
        "train good.toml --process 2/2@here:1",
        ["--process '2/2@here:1'", "INDEX/COUNT@HOST"],
    ),
    "port that is none": ("train good.toml --process 0/1@127.0.0.1:99999", ["127.0.0.1:99999", "HOST:PORT"]),
    "vocabulary below the bytes": ("train good.toml model.vocab_size=200", ["200", "model.vocab_size=257"]),
}
DATA = {
    "missing text": ("train good.toml data.text=missing.txt", ["data.text", "missing.txt"]),
    "text that has to be fetched": (
        "train shakespeare_char training.batch=16",
        ["data.text", "curl -o tinyshakespeare.txt https://raw.githubusercontent.com/karpathy/char-rnn"],
    ),
    "text of the repository": ("train data_mixture", ["data.sources.notes.text", "root of jaxlm's repository"]),
    "text that is none": ("train good.toml data.text=picture.png", ["data.text", "picture.png", ".txt"]),
    "a text instead of its path": (f"train good.toml 'data.text={'To be, or not. ' * 30}'", ["data.text"]),
    "lines instead of a path": ("train good.toml 'data.text=To be,\nor not to be'", ["data.text"]),
    "missing tokenizer": ("train good.toml data.tokenizer=none.json", ["data.tokenizer", "none.json"]),
    "broken tokenizer": ("train good.toml data.tokenizer=garbage.json", ["data.tokenizer", "garbage.json"]),
    "cache of nobody": ("train good.toml data.cache=~nobody-there", ["data.cache", "'~nobody-there'", "not a path"]),
    "cache of no name": ("""train good.toml 'data.cache="\\u0000"'""", ["data.cache", "not a path"]),
    "tokenizer of nobody": ("train good.toml data.tokenizer=~nobody-there/t.json", ["data.tokenizer", "not a path"]),
    "cache that is a file": ("train good.toml data.cache=text.txt", ["data.cache", "text.txt"]),
    "text that is not UTF-8": ("train good.toml data.text=latin.txt", ["data.text", "latin.txt", "UTF-8"]),
    "empty text": ("train good.toml data.text=empty.txt", ["data.text", "empty.txt", "empty"]),
    "vocabulary below the characters": (
        "train good.toml data.tokenizer=characters model.vocab_size=8",
        ["model.vocab_size = 8", "set model.vocab_size=14"],
    ),
    "vocabulary below bpe": (
        "train good.toml data.tokenizer=bpe model.vocab_size=100",
        ["model.vocab_size = 100", "257"],
    ),
}
FOLDERS = {
    "out that a library reads as a pattern": (
        "train good.toml --out 'lr=[1e-3]'",
        ["lr=[1e-3]/checkpoints has '[1e-3]'", "choose another --out"],
    ),
    "config that is a folder and no run": ("plan foreign --on h200-sxm", ["foreign is a folder and no run", "RUN"]),
    "out is another's folder": ("train good.toml --out foreign", ["foreign", "no run", "--out"]),
    "out is a file": ("train good.toml --out text.txt", ["text.txt", "no run", "--out"]),
    "out is under a file": ("train good.toml --out text.txt/run", ["text.txt/run"]),
    "out cannot be made": ("train good.toml --out /proc/run", ["/proc/run", "cannot be made", "--out"]),
    "out holds a config and no run": ("train good.toml --out config_alone", ["config_alone"]),
    "out holds another's config": ("train good.toml --out other_config", ["other_config/config.toml"]),
    "out was begun otherwise": (
        "train good.toml --out run model.num_layers=2",
        ["run", "model.num_layers = 1, not 2", "--out"],
    ),
    "average turned on in the middle": (
        "train good.toml --out run training.ema_decay=0.99",
        ["run was trained with no training.ema_decay, not 0.99", "bound to", "--out"],
    ),
    "another optimizer in the middle": (
        "train good.toml --out run optimizer.kind=muon",
        ["run", "optimizer.kind = adamw, not muon", "--out"],
    ),
    "average of a run without": ("eval run --ema", ["run keeps no average", "training.ema_decay", "--ema"]),
    "generation from no average": ("generate run --prompt a --ema", ["run keeps no average", "--ema"]),
    "run that is missing": ("eval nowhere", ["nowhere", "no run", "jaxlm train"]),
    "run that is a file": ("eval text.txt", ["text.txt", "no run"]),
    "run that is another's folder": ("eval foreign", ["foreign", "no run", "config.json of a Hugging Face directory"]),
    "start from a file": (
        "train good.toml --from good.toml",
        ["good.toml is a file and no run; give a run, a Hugging"],
    ),
    "import of a folder of text": (
        "import foreign new",
        ["foreign holds no config.json; give a Hugging Face directory"],
    ),
    "import of a file": ("import text.txt new", ["text.txt is a file; give a Hugging Face directory, hf:ORG/NAME or"]),
    "import of what is not there": ("import nowhere new", ["nowhere is not there; give a Hugging Face directory"]),
    "import of a run": ("import run new", ["run is a run already; use it as it is, or give a Hugging Face directory"]),
    "run with another's config": ("eval other_config", ["other_config/config.toml"]),
    "run with another architecture": (
        "eval run model.num_layers=3",
        ["run was trained with model.num_layers = 1, not 3", "out"],
    ),
    "run with another norm": (
        "eval run model.norm.kind=layer",
        ["run was trained with model.norm.kind = rms, not layer"],
    ),
    "generate with another vocabulary": (
        "generate run --prompt a model.vocab_size=265",
        ["run was trained with model.vocab_size = 264, not 265"],
    ),
    "run with a bad override": ("eval run training.step=3", ["training.step", "training.steps"]),
    "generate without a run": ("generate nowhere --prompt a", ["nowhere", "no run", "jaxlm train"]),
    "generation with another's tokenizer": (
        "generate crossed --prompt a",
        ["crossed/tokenizer.json has 300 tokens", "model.vocab_size = 264", "put that back"],
    ),
    "other text with another's tokenizer": ("eval crossed --data text.txt", ["crossed/tokenizer.json has 300 tokens"]),
    "generation with another seed of training": (
        "generate run --prompt a training.seed=1",
        [
            "training.seed changes nothing here",
            "model, mesh, execution.dtype, execution.kernels, execution.quantize",
            "leave it out",
        ],
    ),
    "generation with another tokenizer": (
        "generate run --prompt a data.tokenizer=none.json",
        ["data.tokenizer changes nothing here"],
    ),
    "loss with another number of steps": ("eval run evaluation={batches=1}", ["evaluation.batches changes nothing"]),
    "other text in other tokens": (
        "eval run --data text.txt data.tokenizer=characters",
        ["data.tokenizer changes nothing here", "data.field"],
    ),
    "some of other text": ("eval run --data text.txt data.documents=1", ["data.documents changes nothing here"]),
    "tasks in rows": ("eval run --tasks hellaswag training.sequence=8", ["training.sequence changes nothing here"]),
    "prompt without a tokenizer": ("generate config_alone --prompt a", ["config_alone", "--token-ids"]),
}
GENERATION = {
    "negative temperature": ("generate run --prompt a --temperature -1", ["--temperature -1", "0"]),
    "no temperature": ("generate run --prompt a --temperature nan", ["--temperature nan", "0"]),
    "infinite temperature": ("generate run --prompt a --temperature inf", ["--temperature inf"]),
    "temperature too near 0": (
        "generate run --prompt a --temperature 1e-40",
        ["--temperature 1e-40", "0, or from 1e-06"],
    ),
    "temperature too high": ("generate run --prompt a --temperature 1e300", ["--temperature 1e+300", "to 1e+06"]),
    "seed too large": (
        f"generate run --prompt a --seed {'9' * 20}",
        ["--seed 99999999999999999999", "to 9223372036854775807"],
    ),
    "seed too small": (f"generate run --prompt a --seed -{'9' * 20}", ["--seed -99999999999999999999", "from -9223"]),
    "no tokens": ("generate run --prompt a --max-tokens 0", ["--max-tokens 0", "1 or more"]),
    "fewer tokens than none": ("generate run --prompt a --max-tokens -1", ["--max-tokens -1", "1 or more"]),
    "more tokens than the context": (
        "generate run --token-ids 1,2 --max-tokens 32",
        ["context_length = 32", "at most 31"],
    ),
    "prompt that fills the context": (
        f"generate run --prompt {'a' * 40}",
        ["a prompt of 41 tokens exceeds", "context_length = 32"],
    ),
    "prompt that is not UTF-8": ("generate run --prompt a\udcff", ["not UTF-8 after its first 1 characters"]),
    "token id of another vocabulary": ("generate run --token-ids 1,264", ["264", "0 to 263"]),
    "top-k of none": ("generate run --prompt a --top-k 0", ["--top-k 0", "1"]),
    "top-p of nothing": ("generate run --prompt a --top-p 0", ["--top-p 0", "above 0"]),
    "top-p of more than all": ("generate run --prompt a --top-p 1.5", ["--top-p 1.5", "at most 1"]),
    "min-p of more than all": ("generate run --prompt a --min-p 1.5", ["--min-p 1.5", "from 0 to 1"]),
    "repetition penalty of nothing": (
        "generate run --prompt a --repetition-penalty 0",
        ["--repetition-penalty 0", "1 is none"],
    ),
    "presence penalty beyond its range": (
        "generate run --prompt a --presence-penalty 3",
        ["--presence-penalty 3", "from -2 to 2"],
    ),
    "frequency penalty that is no number": (
        "generate run --prompt a --frequency-penalty nan",
        ["--frequency-penalty nan", "from -2 to 2"],
    ),
    "words for token ids": ("generate run --token-ids one,two", ["--token-ids", "'one,two'", "1,2,3"]),
    "no token ids": ("generate run --token-ids ''", ["--token-ids", "''", "1,2,3"]),
    "token ids with a gap": ("generate run --token-ids 1,,2", ["--token-ids", "'1,,2'", "1,2,3"]),
}
# Found only once JAX is there: it reads the checkpoints.
AFTER_JAX = {
    "run without a checkpoint": ("eval run", ["run", "no whole checkpoint", "jaxlm train"]),
    "generation without a checkpoint": ("generate run --prompt a", ["run", "no whole checkpoint"]),
}
BEFORE_JAX = {**ARGUMENTS, **CONFIGURATIONS, **DATA, **FOLDERS, **GENERATION}
ALL = {**BEFORE_JAX, **AFTER_JAX}


@pytest.mark.parametrize("case", ALL)
def test_bad_input_is_one_line_and_leaves_nothing(case, place, capsys):
    arguments, says = ALL[case]
    before = files(place)
    check(main(shlex.split(arguments)), *capsys.readouterr(), says)
    assert files(place) == before


# Reading arguments, files and folders takes no JAX, and need not wait for it.
WITHOUT_JAX = [
    "misspelt command",
    "unknown option",
    "missing config",
    "unknown key",
    "mesh that does not divide",
    "missing text",
    "vocabulary below the characters",
    "out is another's folder",
    "run that is missing",
    "generate without a run",
    "negative temperature",
    "words for token ids",
]


def test_bad_input_is_found_before_jax_is_imported(place):
    """By one process for all of it, which says for each case its status and whether JAX is there."""
    code = """
import json, sys
from jaxlm.cli import main
for case, arguments in json.loads(sys.argv[1]).items():
    print(json.dumps([case, main(arguments), "jax" in sys.modules]))
"""
    cases = {case: shlex.split(BEFORE_JAX[case][0]) for case in WITHOUT_JAX}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(cases)], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[case, 2, False] for case in WITHOUT_JAX]


@pytest.mark.parametrize("case", ["no command", "unknown key", "run that is missing", "top-k of none"])
def test_a_process_with_bad_input_ends_with_status_2(case, place):
    arguments, says = BEFORE_JAX[case]
    before = files(place)
    code = "from jaxlm.cli import main; raise SystemExit(main())"
    done = subprocess.run([sys.executable, "-c", code, *shlex.split(arguments)], capture_output=True, text=True)
    check(done.returncode, done.stdout, done.stderr, says)
    assert files(place) == before


def test_json_does_not_change_how_bad_input_is_refused(place, capsys):
    arguments, says = CONFIGURATIONS["unknown key"]
    check(main([*shlex.split(arguments), "--json"]), *capsys.readouterr(), says)


def test_a_mesh_larger_than_any_cpu_begins_no_run(place, unmeasured, monkeypatch, capsys):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    assert main(["train", "good.toml", "mesh.data=100000", "training.batch=100000"]) == 2
    printed = capsys.readouterr()
    assert "the mesh needs 100000 devices of this CPU, and at most 1024" in printed.err.splitlines()[-1]
    assert not (place / "runs").exists()


def test_a_mesh_larger_than_the_machine_begins_no_run(place, unmeasured, capsys):
    """The data may have been prepared by then, but later settings need not be those that were refused."""
    assert main(["train", "good.toml", "mesh.data=16", "training.batch=16"]) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last.startswith("jaxlm: mesh.data = 16") and "8 devices" in last
    assert printed.out == ""
    assert not (place / "runs").exists()


@pytest.mark.parametrize("host", sampled(["127.0.0.1", "elsewhere"], ["elsewhere"]))
def test_a_port_that_is_in_use_begins_no_run(host, place):
    """On another host's name process 0 listens on every interface."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        code = "from jaxlm.cli import main; raise SystemExit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, "train", "good.toml", "--process", f"0/1@{address}"],
            capture_output=True,
            text=True,
        )
    refusal = f"process 0 cannot listen at {address} (Address already in use); choose another port"
    check(done.returncode, done.stdout, done.stderr, [refusal])
    assert not (place / "runs").exists()


@pytest.mark.parametrize("platform", sampled(["cuda", "foo"], ["cuda"]))
def test_a_platform_that_is_not_here_begins_no_run(platform, place):
    code = "from jaxlm.cli import main; raise SystemExit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "good.toml"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": platform},
    )
    assert done.returncode == 2, done.stderr
    # What a plugin logs stands before it.
    assert done.stderr.splitlines()[-1].startswith(f"jaxlm: JAX_PLATFORMS={platform} is not available here")
    assert done.stdout == "" and not (place / "runs").exists()


def test_a_pattern_that_matches_nothing_begins_no_run(place, unmeasured, capsys):
    assert main(["train", "good.toml", "optimizer.groups=[{pattern='embeding'}]"]) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last.startswith("jaxlm: optimizer.groups[0].pattern = 'embeding' matches no parameter; there are embedding")
    assert printed.out == "" and not (place / "runs").exists()


def test_a_folder_that_was_made_meanwhile_is_not_shared(tmp_path):
    """Two first starts: the one that opens the run later finds it taken."""
    run, late = Run(tmp_path / "run"), Run(tmp_path / "run")
    for each in (run, late):
        each.claim()  # there is nothing yet
    run.paths.directory.mkdir()
    run.claim()
    with pytest.raises(InputError, match="another jaxlm train is at work"):
        late.claim()


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    Run(tmp_path).claim()


@pytest.mark.parametrize("command", ["train", "eval"])
def test_overrides_are_not_said_to_be_required(command, capsys):
    assert main([command]) == 2
    assert "key=value" not in capsys.readouterr().err


def test_a_full_disk_is_one_line(place, monkeypatch, capsys):
    """Wherever it is found: here where the run's settings are written."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/good/config.toml")

    monkeypatch.setattr(JobFolder, "check", refuse)
    assert main(["train", "good.toml"]) == 1
    assert capsys.readouterr().err == "jaxlm: No space left on device: runs/good/config.toml; make room\n"
