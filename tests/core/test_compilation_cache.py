"""The folder of compiled programs."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import runs

from jaxlm.core import compilation_cache, kept_programs

KEYS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)


@pytest.fixture
def enabled(tmp_path, monkeypatch):
    """Enable it in a home of its own. Return its folder, if it is used, and what was said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {key: getattr(jax.config, key) for key in KEYS}
    jax.config.update("jax_compilation_cache_dir", None)

    def enable():
        said = []
        compilation_cache.enable(said.append)
        return jax.config.jax_compilation_cache_dir, said

    yield enable
    kept_programs.keep_in(None)
    for key, value in before.items():
        jax.config.update(key, value)


def test_its_user_alone_may_read_it_and_its_size_is_bounded(enabled, tmp_path):
    folder, said = enabled()
    assert not said and folder.startswith(str(tmp_path / "jaxlm" / "programs"))
    for path in (folder, os.path.dirname(folder), os.path.join(folder, "whole")):
        assert os.stat(path).st_mode & 0o777 == 0o700
    assert 0 < jax.config.jax_compilation_cache_max_size <= 2**31


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_programs_that_others_could_have_written_are_not_run(enabled, tmp_path, mode):
    programs = tmp_path / "jaxlm" / "programs"
    programs.mkdir(parents=True)
    programs.chmod(mode)
    folder, (said,) = enabled()
    assert folder is None and said.endswith(f"may be written by others; run: chmod go-w {programs}")


def test_programs_of_another_user_are_not_run(enabled, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    folder, (said,) = enabled()
    assert folder is None and "belongs to another user" in said


def test_a_cache_that_the_user_chose_or_switched_off_stays(enabled, tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    assert enabled() == (None, [])
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", "mine")
    assert enabled() == ("mine", []) and not (tmp_path / "jaxlm").exists()


def test_a_program_that_was_written_in_part_is_removed(enabled):
    """JAX's eviction would fail at it for ever."""
    folder, _ = enabled()
    for name in ("whole-cache", "whole-atime", "killed-cache"):
        Path(folder, name).touch()
    jax.config.update("jax_compilation_cache_dir", None)
    enabled()
    assert sorted(os.listdir(folder)) == ["whole", "whole-atime", "whole-cache"]


@pytest.mark.slow
def test_a_second_start_lowers_nothing(tmp_path):
    run = runs.untrained(tmp_path / "run", "model.num_layers=1")
    environment = {**runs.environment(), "XDG_CACHE_HOME": str(tmp_path / "home")}
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    asked = ["generate", str(run), "--max-tokens", "5", "--temperature", "0", "--slots", "1", "--prompt"]
    refusing = "import jax; jax.stages.Traced.lower = lambda traced: sys.exit('lowered')"

    def generate(prompt, first=""):
        command = [sys.executable, "-c", f"import sys; {first}\nfrom jaxlm.cli import main; sys.exit(main())"]
        done = subprocess.run([*command, *asked, prompt], capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout

    texts = generate("alpha"), generate("alpha", refusing)
    assert texts[0] == texts[1]
    generate("another prompt", refusing)
