"""The folder of a run."""

import pytest

from jaxlm.errors import InputError
from jaxlm.run import Run


def test_a_folder_is_of_one_job(tmp_path):
    first, second = Run(tmp_path), Run(tmp_path)
    second.check_free()
    assert not list(tmp_path.iterdir())
    first.claim()
    for ask in (second.check_free, second.claim):
        with pytest.raises(InputError, match="another jaxlm train is at work in .*; wait for its end"):
            ask()
    Run(tmp_path / "not there yet").check_free()


def test_those_who_ask_at_once_are_not_in_one_another_s_way(tmp_path):
    import fcntl

    run = Run(tmp_path)
    with run.paths.lock.open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        run.check_free()
