"""`jaxlm bench serve`: loads as data, figures by hand, and a whole load of a server."""

import json
from pathlib import Path

import numpy as np
import pytest
from serving import CONTEXT, serving

from jaxlm.cli import main
from jaxlm.core.errors import InputError
from jaxlm.server.load.client import Answered
from jaxlm.server.load.figures import figures
from jaxlm.server.load.workload import Load

pytestmark = pytest.mark.xdist_group("server")


def test_lengths_spread_about_their_means():
    load = Load(requests=2000, warm_up=0, input_tokens=40, output_tokens=10, spread=0.5).check()
    texts = load.texts(100)
    read, follow = ([len(text.prompt) for text in texts], [text.max_tokens for text in texts])
    assert (min(read), max(read), min(follow), max(follow)) == (20, 60, 5, 15)
    # Four deviations of the mean of 2000 draws that are even over 41, or 11, numbers.
    assert abs(np.mean(read) - 40) < 4 * 11.8 / 2000**0.5 and abs(np.mean(follow) - 10) < 4 * 3.2 / 2000**0.5
    assert {id for text in texts for id in text.prompt} == set(range(100)) and load.longest == 75
    assert load.texts(100) == texts and Load(requests=2000, seed=1).texts(100) != texts


def test_prefixes_are_shared():
    load = Load("shared-prefix", requests=60, warm_up=0, input_tokens=20, prefix_tokens=15, prefixes=3).check()
    prompts = [text.prompt for text in load.texts(1000)]
    assert len({tuple(prompt[:15]) for prompt in prompts}) == 3 and len({tuple(prompt) for prompt in prompts}) == 60


@pytest.mark.parametrize(("burstiness", "deviation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_times_are_random_with_a_mean_rate(burstiness, deviation):
    """The deviation of a gamma distribution is its mean over the root of its shape."""
    times = Load(requests=20_000, rate=4.0, burstiness=burstiness).check().times()
    waits = np.diff(times)
    assert times[0] == 0 and np.mean(waits) == pytest.approx(0.25, rel=0.06)
    assert np.std(waits) == pytest.approx(0.25 * deviation, rel=0.06)
    assert set(Load(requests=5).times()) == {0.0}


def test_figures_are_those_by_hand():
    first = Answered(10, 3, sent=0.0, chunks=(0.1, 0.2, 0.4), ended=0.5, error=None)
    second = Answered(20, 1, sent=0.3, chunks=(0.6,), ended=0.8, error=None)
    found = figures([first, second], 1, 0.8, {"ttft": 200.0, "itl": 150.0})
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_e2el_ms"] == pytest.approx(500)
    assert found["mean_tpot_ms"] == pytest.approx(200)  # of the first alone: (500 - 100) / 2
    assert found["mean_itl_ms"] == pytest.approx(150) and found["p99_itl_ms"] == pytest.approx(199)
    assert (found["completed"], found["failed"], found["total_input_tokens"]) == (2, 1, 30)
    assert found["output_throughput"] == pytest.approx(4 / 0.8) and found["request_goodput"] == 0  # a gap of 200 ms
    assert figures([first, second], 1, 0.8, {"ttft": 200.0})["request_goodput"] == pytest.approx(1 / 0.8)
    assert found["mean_concurrency"] == pytest.approx((0.5 + 0.5) / 0.8)
    assert found["steady_output_throughput"] is None  # no request began after one had ended
    third = second._replace(sent=0.7, chunks=(0.75,), ended=0.9)
    assert figures([first, second, third], 0, 0.9, {})["steady_output_throughput"] == pytest.approx(1 / 0.2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"requests": 0}, "--requests 0 must be 1 or more"),
        ({"concurrency": 0}, "--concurrency 0 must be 1 or more"),
        ({"rate": 0.0}, "--rate 0 must be above 0"),
        ({"spread": 1.0}, "--spread 1 must be 0 or more, and below 1"),
        ({"prefix_tokens": 100, "spread": 0.5}, "--prefix-tokens 100 must be fewer than a prompt has at least, 64"),
        ({"warm_up": -1}, "--warm-up -1 must be 0 or more"),
    ],
)
def test_a_load_without_meaning_is_refused(changes, why):
    with pytest.raises(InputError, match=why):
        Load(**changes).check()


@pytest.fixture
def config(engine, tmp_path):
    """The configuration of the model that the engine runs."""
    from jaxlm.core.toml import to_toml

    path = tmp_path / "tiny.toml"
    path.write_text(to_toml({"model": engine.model.model_dump(mode="json", exclude_none=True)}))
    return path


def said(capsys, *arguments, status=0):
    assert main(["bench", "serve", *map(str, arguments)]) == status
    return capsys.readouterr()


@pytest.mark.parametrize(
    "arrivals", [["--concurrency", 3], ["--rate", 50, "--burstiness", 0.5]], ids=["closed", "open"]
)
def test_a_server_is_measured_beside_its_bounds(arrivals, server, config, tmp_path, capsys):
    _, url = server
    file = tmp_path / "figures.json"
    lengths = ["--input-tokens", 40, "--output-tokens", 6, "--load", "shared-prefix", "--prefixes", 2, "--warm-up", 2]
    asked = [config, "--url", url, "--requests", 8, *lengths, *arrivals, "--on", "h200-sxm", "--goodput", "ttft:60000"]
    out, _ = said(capsys, *asked, "--out", file)
    found = json.loads(file.read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (8, 0, 48)
    assert found["total_input_tokens"] == 320 and found["load"]["prefix_tokens"] == 30
    assert found["request_goodput"] == found["request_throughput"] > 0
    for name in ("ttft", "tpot", "e2el"):
        assert 0 < 1e3 * found["bounds"][name] < found[f"mean_{name}_ms"] <= found[f"p99_{name}_ms"]
    assert found["bounds"]["output_throughput"] > found["output_throughput"]
    assert max(map(len, out.splitlines())) <= 80 and "8 requests in " in out and "goodput: " in out
    if arrivals[0] == "--concurrency":
        assert found["mean_concurrency"] <= 3


def test_requests_that_fail_are_counted_and_shown(engine, tokenizer, config, capsys):
    with serving(engine, tokenizer, keys=["right"]) as (_, url):
        _, error = said(capsys, config, "--url", url, "--name", "tiny", "--requests", 2, "--warm-up", 0, status=1)
        assert error.startswith("jaxlm: all 2 requests failed: 401: ")
        _, error = said(capsys, config, "--url", url, status=2)
        assert "has no model in /v1/models" in error
        key = config.with_name("key")
        key.write_text("right\n")
        out, _ = said(
            capsys, config, "--url", url, "--api-key-file", key, "--requests", 2, "--output-tokens", 2, "--json"
        )
    assert json.loads(out)["completed"] == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--prefixes", 3], "--prefix-tokens and --prefixes are of --load shared-prefix"),
        (["--burstiness", 2], "--burstiness is of random times: add --rate"),
        (["--goodput", "speed:3"], "--goodput 'speed:3' must be one of ttft, tpot, itl, e2el with milliseconds"),
        (["--input-tokens", CONTEXT], f"exceed model.context_length = {CONTEXT}"),
        (["--on", "h2000"], "h2000"),
        (["--url", "http://127.0.0.1:9"], "--url http://127.0.0.1:9 has no model in /v1/models: "),
        (["--url", "http://127.0.0.1:9", "--slots", 2], "--slots is of a server that is started: leave out --url"),
        (["--name", "tiny"], "--name and --api-key-file are of a server that runs: add --url"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, why, config, capsys):
    _, error = said(capsys, config, *arguments, status=2)
    assert why in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_server_is_started_and_ended(monkeypatch, capfd):
    """The server itself says what is wrong with the weights."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    stories = Path(__file__).parents[1] / "families" / "stories260K"
    smaller = ["--slots", 2, "--chunk-tokens", 32, "--max-context", 400]  # with the programs of test_serve_command.py
    lengths = [*smaller, "--requests", 3, "--input-tokens", 9, "--output-tokens", 4, "--json"]
    out, _ = said(capfd, stories, "execution.dtype=float32", *lengths)
    assert json.loads(out)["total_output_tokens"] == 12
    _, error = said(capfd, stories.with_name("nothing"), *lengths, status=2)
    assert error.count("\n") == 1
