import os
import signal
import sys
import time

import pytest

from jaxlm.training import interrupt
from jaxlm.training.interrupt import Stopped, StopRequest

SOON_S = 0.5


def nobody(reason):
    raise AssertionError("the main thread was there")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(interrupt, "_NOTICE_S", SOON_S)


@pytest.fixture
def swallowed(monkeypatch):
    """The exceptions that Python drops because a destructor raised them."""
    kinds: list[type] = []
    plain = StopRequest._not_of_stops

    def note(self, dropped):
        kinds.append(dropped.exc_type)
        plain(self, dropped)

    monkeypatch.setattr(StopRequest, "_not_of_stops", note)
    return kinds


def work(seconds=20.0):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(0.01)


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def number(request):
    """The number of a signal that is not ignored, as SIGHUP is under nohup."""
    before = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_that_a_destructor_swallowed_is_told_again(swallowed, number, monkeypatch):
    """Destructors also run in callbacks of the garbage collector. Stopped is not shown; other exceptions are."""
    shown: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: shown.append(dropped.exc_type))

    class Failing:
        def __del__(self):
            raise ValueError

    class SignalsOnDelete:
        def __del__(self):
            os.kill(os.getpid(), number)
            work(0.1)

    with pytest.raises(Stopped) as error, StopRequest(nobody):
        Failing()
        SignalsOnDelete()
        work()
    assert error.value.reason == number
    assert swallowed == [ValueError, Stopped] and shown == [ValueError]
    assert signal.getsignal(number) == signal.default_int_handler


def test_hours_that_a_destructor_swallowed_are_over_too(swallowed, monkeypatch):
    monkeypatch.setattr(interrupt, "process_age", lambda: 0.0)

    class SlowToDelete:
        def __del__(self):
            work(0.5)

    with pytest.raises(Stopped) as error, StopRequest(nobody, hours=0.2 / 3600):
        SlowToDelete()
        work()
    assert error.value.reason == interrupt.OUT_OF_TIME and swallowed == [Stopped]


def test_what_a_stop_cleans_up_is_left_to_end(swallowed):
    """Cleaning up may take any time, also in a dropped generator: only a lost Stopped is raised again."""
    cleaned = []

    def rows():
        try:
            while True:
                yield
        finally:
            work(4 * SOON_S)
            cleaned.append("generator")

    with pytest.raises(Stopped), StopRequest(nobody):
        try:
            for _ in rows():
                os.kill(os.getpid(), signal.SIGTERM)
                work()
        finally:
            try:
                raise ValueError("another one, on the way")
            except ValueError:
                work(2 * SOON_S)
            cleaned.append("block")
    assert sorted(cleaned) == ["block", "generator"] and not swallowed


def test_a_signal_that_was_noted_is_told_nobody_else():
    """Neither while the last words are said."""
    with StopRequest(nobody) as stop:
        with stop.noted():
            os.kill(os.getpid(), signal.SIGTERM)
            work(0.1)
            assert stop.reason() == signal.SIGTERM
        work(4 * SOON_S)
