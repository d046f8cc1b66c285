"""Two replicas of a server by Ray Serve on this machine, and one server by itself, under the same load.

    pip install '.[serve,ray]'
    python benchmarks/ray_serve.py [MODEL]

All share the cores of the machine, so that two replicas are no faster here: what is seen is that texts are the same
through the ingress, that prompts that begin alike meet, that a client who leaves frees its pages, and that a lost
replica is replaced.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import results

ROOT = Path(__file__).parents[1]
PORT = 8123
LOAD = ["--requests", "120", "--concurrency", "16", "--input-tokens", "200", "--output-tokens", "32"]
LOAD += ["--load", "shared-prefix", "--prefixes", "8", "--prefix-tokens", "160"]
WAIT_S = 300.0


def load(model: str, *options: str) -> dict[str, Any]:
    """Return the figures of a load."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "jaxlm", "bench", "serve", model, "execution.dtype=float32", *LOAD]
        subprocess.run([*command, *options, "--out", str(file)], cwd=ROOT, check=True)
        found = json.loads(file.read_text())
        del found["environment"]  # which results files have already
        return found


def replicas() -> dict[int, str]:
    """Return the address of each server under the ingress, by process."""
    found = {}
    listening = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=True).stdout
    for pid in subprocess.run(["pgrep", "-f", "jaxlm serve"], capture_output=True, text=True).stdout.split():
        if address := re.search(rf"(127\.0\.0\.1:\d+) .*pid={pid},", listening):
            found[int(pid)] = f"http://{address[1]}"
    return found


def metric(url: str, name: str) -> float:
    """Return a metric of a server."""
    (value,) = re.findall(rf"^jaxlm_{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    return float(value)


def texts(url: str, model: str) -> list[str]:
    """Return texts of seeds."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 40, "temperature": 1.0}
    answers = [httpx.post(f"{url}/v1/completions", json={**body, "seed": seed}, timeout=WAIT_S) for seed in range(8)]
    return [answer.json()["choices"][0]["text"] for answer in answers]


def leave(url: str, model: str) -> float:
    """Ask for long texts and go away after a part of each; return the seconds until no page is in use."""
    body = {"model": model, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    for _ in range(8):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
            next(answer.iter_lines())
    begun = time.perf_counter()
    while any(metric(each, "pages_held") for each in replicas().values()):
        time.sleep(0.01)
    return time.perf_counter() - begun


def lose(url: str, model: str) -> dict[str, Any]:
    """Kill a replica; return the answers until all are whole again, by status, and the seconds that took."""
    before = replicas()
    os.kill(next(iter(before)), signal.SIGKILL)
    begun, statuses, good = time.perf_counter(), {}, 0
    while (good < 40 or len(replicas()) < len(before)) and time.perf_counter() - begun < WAIT_S:
        number = sum(statuses.values())
        body = {"model": model, "prompt": f"{number % 10} " * 150, "max_tokens": 2}
        status = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).status_code
        statuses[str(status)] = statuses.get(str(status), 0) + 1
        good = good + 1 if status == 200 else 0
    return {"answers": statuses, "seconds": time.perf_counter() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tests/families/stories260K")
    model = parser.parse_args().model
    name, url = Path(model).name, f"http://127.0.0.1:{PORT}"
    alone = load(model)
    command = [sys.executable, "launch/ray_serve.py", model, "--replicas", "2", "--port", str(PORT)]
    ray = subprocess.Popen([*command, "--", "execution.dtype=float32"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert ray.stdout is not None
        while not (line := ray.stdout.readline()).startswith("serving"):
            if not line:
                raise SystemExit("the replicas did not start")
        found = load(model, "--url", url)
        read = {each: metric(each, "prompt_tokens_total") for each in replicas().values()}
        cached = {each: metric(each, "cached_prompt_tokens_total") for each in replicas().values()}
        same = [texts(each, name) for each in (url, *replicas().values())]
        left, lost = leave(url, name), lose(url, name)
        again = texts(url, name)
    finally:
        ray.terminate()
        ray.wait(WAIT_S)
    written = {
        "alone": alone,
        "two_replicas": found,
        "prompt_tokens": list(read.values()),
        "cached_prompt_tokens": list(cached.values()),
        "texts_are_those_of_each_replica": all(each == same[0] for each in [*same, again]),
        "seconds_until_pages_are_free_after_eight_clients_left": left,
        "a_replica_killed": lost,
    }
    print(results.write("ray_serve", results.cpu(), written))


if __name__ == "__main__":
    main()
