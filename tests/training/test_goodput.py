import time

import pytest

from jaxlm.training.goodput import DATA, DEVICE, HOST, Attempts, Clock, ThroughputMeter, process_age, summary


def test_every_moment_belongs_to_the_innermost_phase():
    before = process_age()
    clock = Clock()
    with clock.phase("outer"):
        time.sleep(0.02)
        with clock.phase("inner"):
            time.sleep(0.03)
        time.sleep(0.02)
    seconds = clock.seconds()
    assert seconds["outer"] == pytest.approx(0.04, abs=0.02) and seconds["inner"] == pytest.approx(0.03, abs=0.02)
    assert sum(seconds.values()) == pytest.approx(process_age(), abs=0.05) and seconds["startup"] >= before


def test_throughput_excludes_time_between_steps():
    clock = Clock()
    meter = ThroughputMeter(clock)
    for _ in range(2):
        with clock.phase(DEVICE):
            time.sleep(0.02)
        with clock.phase(DATA):
            time.sleep(0.01)
        meter.add(tokens=30)
    with clock.phase("evaluation"):
        time.sleep(0.2)
    rates = meter.rates()
    assert rates["step_s"] == pytest.approx(0.03, abs=0.02) and rates["data_wait_s"] == pytest.approx(0.01, abs=0.01)
    assert rates["tokens_per_s"] == pytest.approx(30 / rates["step_s"]) and rates["host_s"] < 0.01


def test_the_rate_of_learned_tokens_is_said_where_not_all_are():
    meter = ThroughputMeter(Clock())
    meter.add(30, 30)
    assert "learned_tokens_per_s" not in meter.rates()
    meter.add(30, 10)
    rates = meter.rates()
    assert rates["learned_tokens_per_s"] == pytest.approx(rates["tokens_per_s"] * 40 / 60)


def test_steps_that_were_done_twice_count_once():
    attempts = [
        {"from_step": 0, "to_step": 50, "seconds": {DEVICE: 40.0, HOST: 10.0, "compilation": 10.0}},
        {"from_step": 40, "to_step": 60, "seconds": {DEVICE: 20.0, "data_wait": 10.0}},
    ]
    goodput = summary(attempts)
    assert goodput.seconds == {"training": 60.0, "compilation": 10.0, "lost_steps": 10.0, "data_wait": 10.0}
    assert goodput.share == pytest.approx(60 / 90) and goodput.attempts == 2
    said = str(goodput)
    assert said.startswith("goodput 66.7%: 60 s of 90 s over 2 attempts") and "lost steps 10 s" in said


def test_a_start_that_did_no_step_is_all_loss():
    assert summary([]).share == 0.0
    assert summary([{"from_step": 0, "to_step": 0, "seconds": {"startup": 5.0}}]).share == 0.0


def test_attempts_are_summed_even_if_one_was_killed(tmp_path):
    first = Attempts(tmp_path / "goodput.jsonl", Clock(), 0)
    first.write(7, now=True)  # and killed
    second = Attempts(tmp_path / "goodput.jsonl", Clock(), 5)
    second.write(9, now=True)
    third = Attempts(tmp_path / "goodput.jsonl", Clock(), 9)
    rows = third.goodput()
    assert rows.attempts == 3 and 0.0 <= rows.share <= 1.0
