import os
import signal
import sys
import time

import pytest

from jaxlm.training import interrupt
from jaxlm.training.interrupt import Stopped, StopRequest


def nobody(reason):
    raise AssertionError("the main thread was there")


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(interrupt, "_NOTICE_S", 0.2)


def work(seconds=10.0):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_a_destructor_swallowed_is_told_again(soon, monkeypatch, number):
    """Python drops what is raised in one, as in a callback of its garbage collector."""
    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)

    class Dying:
        def __del__(self):
            os.kill(os.getpid(), number)
            work(0.1)

    handler = signal.getsignal(number)
    with pytest.raises(Stopped) as error, StopRequest(nobody):
        Dying()
        work()
    assert error.value.reason == number
    assert [type(each.exc_value) for each in swallowed] == [Stopped]
    assert signal.getsignal(number) == handler


def test_what_a_stop_cleans_up_is_left_to_end(soon):
    """However long it takes: only what was lost is told again."""
    cleaned = []
    with pytest.raises(Stopped), StopRequest(nobody):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            work()
        finally:
            work(1.0)
            try:
                raise ValueError("another one, on the way")
            except ValueError:
                work(0.5)
            cleaned.append(True)
    assert cleaned


def test_hours_that_a_destructor_swallowed_are_over_too(soon, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(interrupt, "process_age", lambda: 0.0)

    class Dying:
        def __del__(self):
            work(0.5)

    with pytest.raises(Stopped) as error, StopRequest(nobody, hours=0.2 / 3600):
        Dying()
        work()
    assert error.value.reason == interrupt.OUT_OF_TIME
