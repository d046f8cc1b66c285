"""Python's garbage collector begins rarely while a command starts, and as usual afterwards."""

import gc

import pytest

from jaxlm import cli
from jaxlm.core import collector


@pytest.fixture(autouse=True)
def restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_it_begins_rarely_until_what_runs_for_long_has_started(monkeypatch):
    monkeypatch.setattr(collector.atexit, "register", lambda _: None)
    monkeypatch.setattr(collector, "_USUAL", (700, 10, 10))  # tests begin with others
    collector.begin_rarely()
    assert gc.get_threshold()[0] > 100 * 700
    collector.begin_as_usual()
    assert gc.get_threshold() == (700, 10, 10) and gc.get_freeze_count()


def test_a_caller_s_setting_is_left_alone(capsys):
    gc.set_threshold(1234, 5, 6)
    collector.begin_as_usual()
    assert cli.main(["hardware", "h100-sxm5", "--json"]) == 0 and capsys.readouterr().out
    assert gc.get_threshold() == (1234, 5, 6)
