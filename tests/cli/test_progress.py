"""The bars of a terminal, and the lines elsewhere."""

import io

from rich.console import Console

from jaxlm.cli import progress
from jaxlm.cli.progress import Bar

METRICS = {"loss": 1.5, "tokens_per_s": 1000.0}


def show(monkeypatch, terminal: bool) -> str:
    """Data that is not read to its end, then steps."""
    out = io.StringIO()
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=out, force_terminal=terminal, width=100))
    with Bar(2) as bar:
        bar.say("tokenizing")
        for done in (1_000_000, 2_000_000):
            bar.progress("reading web", done, 4_000_000)
        bar.advance(1, METRICS)
        bar.advance(2, METRICS)
    return out.getvalue()


def test_a_terminal_shows_bytes_and_then_steps(monkeypatch):
    shown = show(monkeypatch, True)
    assert shown.index("tokenizing") < shown.index("2.0/4.0 MB") < shown.index("2/2")


def test_elsewhere_there_are_lines(monkeypatch):
    assert show(monkeypatch, False).splitlines() == [
        "tokenizing",
        "reading web: 1 MB of 4 MB",
        "reading web: 2 MB of 4 MB",
        "step 1: loss 1.5000 · 1,000 tokens/s",
        "step 2: loss 1.5000 · 1,000 tokens/s",
    ]


def test_a_line_says_what_is_learned_and_how_often_it_was_read(monkeypatch):
    metrics = {"loss": 0.5, "tokens_per_s": 2000.0, "learned_tokens_per_s": 150.0, "epoch": 1.34}
    metrics |= {"accuracy": 0.75, "margin": 0.2}
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=out, force_terminal=False, width=100))
    Bar(1).advance(1, metrics)
    learned = "2,000 tokens/s, 150 of them learned"
    assert out.getvalue() == f"step 1: loss 0.5000 · accuracy 75.0% · margin 0.2000 · epoch 1.3 · {learned}\n"


def test_a_resumed_run_begins_its_bar_at_its_step(monkeypatch):
    """The steps before are no measure of the time left."""
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=io.StringIO(), force_terminal=True, width=100))
    with Bar(1000) as bar:
        bar.begin(900)
        (task,) = bar._bar.tasks
        assert (task.completed, task.total, task.speed) == (900, 1000, None)
        for step in (901, 902, 903):
            bar.advance(step, None)
        assert task.completed == 903 and sum(sample.completed for sample in task._progress) == 3


def test_what_is_compiled_is_said_in_a_line(monkeypatch):
    for terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=100, highlight=False)
        monkeypatch.setattr(progress, "Console", lambda console=console, **_: console)
        with progress.saying("compiling 7 programs"):
            pass
        assert "jaxlm: compiling 7 programs …\n" in out.getvalue()
