"""`jaxlm serve` as a process: it says where it listens, ends in order, and fails with a status."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
import runs

from jaxlm.cli import main
from jaxlm.parallel.layout import Layout
from jaxlm.runs.published import PublishedSource

pytestmark = pytest.mark.xdist_group("server")

STORIES = Path(__file__).parents[1] / "families" / "stories260K"
SMALL = ("--port", "0", "--slots", "2", "--chunk-tokens", "32", "--max-context", "400")
SAID = "jaxlm: computing in float32, as the weights are stored\n"
PROMPT = {"model": "stories260K", "prompt": "Once upon a time", "temperature": 0}
# The engine fails at its hundredth step, after those of its check.
FAILING = """
from jaxlm.inference.engine import Engine
step, steps = Engine.step, []
def failing(engine):
    steps.append(0)
    if len(steps) > 100:
        raise RuntimeError("the device is lost")
    return step(engine)
Engine.step = failing
"""


@pytest.fixture
def serve():
    """Return a function that starts `jaxlm serve` and returns its process, with its address once it listens."""
    started = []

    def start(*arguments, before=""):
        code = f"{before}\nimport sys; from jaxlm.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "serve", str(STORIES), *SMALL, "--json", *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=runs.environment(1)
        )
        started.append(process)
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        said = json.loads(line)
        assert (said["model"], said["pid"]) == ("stories260K", process.pid)
        return process, said["url"]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def story(count):
    """Return how others continue the prompt with these weights, in so many tokens."""
    ids = json.loads((STORIES / "stories260K_tokens.json").read_text())["tokens"]
    tokenizer = PublishedSource(STORIES).text.load_tokenizer()
    prompt = tokenizer.encode_prompt(PROMPT["prompt"])
    assert ids[: len(prompt)] == prompt
    return tokenizer.decode(ids[: len(prompt) + count])[len(PROMPT["prompt"]) :]


def ended(process):
    """Return the exit status of a process and what it wrote to standard error."""
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def streamed(url, **options):
    """Ask for a stream in another thread. Return the thread, and its chunks once it has ended."""
    chunks, begun = [], threading.Event()

    def read():
        body = {**PROMPT, "stream": True, **options}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line:
                    chunks.append(line.removeprefix("data: "))
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    return thread, chunks


@pytest.mark.slow
def test_it_serves_with_a_key_and_drains(serve, tmp_path):
    """Row 33: what is under way at SIGTERM is finished, and nothing new is taken."""
    (tmp_path / "keys").write_text("# of the test\nsesame\n\n")
    process, url = serve("--api-key-file", str(tmp_path / "keys"))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0) as client:
        text = client.completions.create(**PROMPT, max_tokens=50).choices[0].text
        assert text == story(50)
        assert httpx.get(f"{url}/health").json() == {
            "status": "ok",
            "model": "stories260K",
            "chat": False,
            "exact": True,
            "dtype": "float32",
            "quantize": None,
            "cache_dtype": None,
            "speculate": None,
            "mesh": dict(Layout()),
        }
        assert httpx.get(f"{url}/v1/models").status_code == 401
        stream = client.completions.create(**PROMPT, max_tokens=300, stream=True)
        pieces = [next(stream).choices[0].text]
        process.send_signal(signal.SIGTERM)
        reasons = []
        for chunk in stream:
            pieces.append(chunk.choices[0].text)
            reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] in ("length", "stop") and "".join(pieces).startswith(text)
    assert ended(process) == (0, SAID)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_does_not_end_in_time_ends_with_an_error_and_it_starts_again(serve):
    """Also after it was killed, at the address that it had."""
    process, url = serve("--drain-seconds", "0")
    port = url.rpartition(":")[2]
    thread, chunks = streamed(url, max_tokens=390, n=64)
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, SAID)
    thread.join()
    assert json.loads(chunks[-2])["error"]["code"] == "draining" and chunks[-1] == "[DONE]"
    process, url = serve("--port", port)
    process.kill()
    process.communicate()
    process, again = serve("--port", port)
    assert again == url and httpx.get(f"{url}/health").status_code == 200


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_failed_engine_ends_it_with_a_status(serve):
    """Row 34, after every stream was told."""
    process, url = serve(before=FAILING)
    thread, chunks = streamed(url, max_tokens=390)
    status, errors = ended(process)
    thread.join()
    assert status == 1 and errors == f"{SAID}jaxlm: the engine has failed: RuntimeError: the device is lost\n"
    assert "the device is lost" in chunks[-2] and chunks[-1] == "[DONE]"


def refused(capsys, *arguments):
    assert main(["serve", str(STORIES), *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "from 0 to 65535"),
        (["--slots", "0"], "a whole number from 1 on"),
        (["--max-queued", "0"], "--max-queued 0 must be above 0"),
        (["--cache-memory", "much"], "a size such as 512MiB or 2GiB"),
        (["--drain-seconds", "-1"], "must be 0 or more"),
        (["--host", "no.such.host.invalid"], "choose another"),
        (["--api-key-file", "there-is-none"], "cannot be read"),
        (["training.batch=3"], "training.batch"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys):
    assert says in refused(capsys, *arguments)


def test_an_address_in_use_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begun = time.monotonic()
        assert "choose another" in refused(capsys, "--port", str(port))
    assert time.monotonic() - begun < 5.0  # before a model is loaded


def test_a_file_of_keys_holds_some(tmp_path, capsys):
    for content in ("", "# none\n", "with blanks in it\n", "schlüssel\n"):
        (tmp_path / "keys").write_text(content)
        assert "must hold a key in each line" in refused(capsys, "--api-key-file", str(tmp_path / "keys"))


def test_a_server_s_packages_are_named(monkeypatch, capsys):
    from jaxlm.cli import serve as command

    monkeypatch.setattr(command, "_NEEDS", ("starlette", "no_such_package"))
    assert "pip install -e '.[serve]'" in refused(capsys)


@pytest.mark.exhaustive  # tests/inference/test_leader.py has the engine of another process do the same
def test_two_processes_serve_one_model(tmp_path):
    """Each has a half of the heads. Texts are those of one, whatever is cancelled beside them; both end in order."""
    port, command = runs.free_port(), "import sys; from jaxlm.cli import main; sys.exit(main())"
    options = ["serve", str(STORIES), "execution.dtype=float32", "mesh.tensor=2", *SMALL, "--json", "--process"]
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", command, *options, f"{index}/2@127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=runs.environment(1),
        )
        for index in range(2)
    )
    try:
        line = first.stdout.readline()
        assert line, first.communicate()[1]
        url = json.loads(line)["url"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            left = client.completions.create(**PROMPT, max_tokens=300, stream=True)
            next(iter(left))
            both = [streamed(url, max_tokens=40) for _ in range(2)]
            left.close()
            assert client.completions.create(**PROMPT, max_tokens=40).choices[0].text == story(40)
            for thread, chunks in both:
                thread.join(60)
                texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1]]
                assert "".join(texts) == story(40)
            stopped = client.completions.create(**PROMPT, max_tokens=40, stop=["Lily"]).choices[0]
            assert stopped.finish_reason == "stop" and "Lily" not in stopped.text
        deadline = time.monotonic() + 30
        while "jaxlm_pages_held 0.0" not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        assert ended(first)[0] == ended(second)[0] == 0
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_processes_that_were_asked_for_other_things_end(tmp_path):
    port = runs.free_port()
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jaxlm",
                "serve",
                str(STORIES),
                *SMALL,
                *more,
                "--process",
                f"{i}/2@127.0.0.1:{port}",
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=runs.environment(1),
        )
        for i, more in enumerate(([], ["--slots", "4"]))
    ]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2 and "(slots = 4, not 2); start all with the same MODEL" in errors
