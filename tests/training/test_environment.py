"""The load of this machine by other programs."""

import pytest

from jaxlm.training import environment


def test_the_share_of_other_programs_is_what_this_one_does_not_use(monkeypatch):
    seconds = iter([(100.0, 50.0, 10.0), (120.0, 60.0, 12.0)])
    monkeypatch.setattr(environment, "_processor_seconds", lambda: next(seconds))
    assert environment.MachineLoad().others() == pytest.approx(0.4)


def test_a_system_that_does_not_tell_its_load(monkeypatch):
    here = environment.MachineLoad().others()
    assert here is None or 0 <= here <= 1
    monkeypatch.setattr(environment, "_processor_seconds", lambda: None)
    assert environment.MachineLoad().others() is None
