"""Models of the Hugging Face Hub, from an endpoint on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from jaxlm.families import hub

STORIES = Path(__file__).parent / "stories260K"
COMMIT = "5f1c" * 10
WEIGHTS = "model.safetensors"


class _Endpoint(BaseHTTPRequestHandler):
    """Serves one model, ORG/stories, as the Hub does, and records the files that are asked for."""

    fetched: list[str] = []
    unwanted = {"pytorch_model.bin": b"not to be fetched"}

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        asked = unquote(urlsplit(self.path).path)
        files = {file.name: file.read_bytes() for file in STORIES.iterdir()} | self.unwanted
        if asked.startswith("/api/models/ORG/stories/revision/"):
            self._send(json.dumps({"id": "ORG/stories", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}))
        elif asked.startswith("/api/models/ORG/stories/tree/"):
            listed = [{"type": "file", "path": f, "size": len(x), "oid": _etag(x)} for f, x in files.items()]
            self._send(json.dumps(listed))
        elif asked.startswith("/ORG/stories/resolve/") and (name := asked.rpartition("/")[2]) in files:
            if body:
                self.fetched.append(name)
            self._send(files[name], body, {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": COMMIT})
        else:
            self._send('{"error": "not found"}', body, {"X-Error-Code": "RepoNotFound"}, 404)

    def _send(self, content: str | bytes, body: bool = True, headers: dict[str, str] | None = None, status=200) -> None:
        content = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """The environment of a process that takes this machine for the Hub."""
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    yield {**os.environ, **names, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    server.shutdown()


def run(code: str, environment: dict[str, str]) -> str:
    """Run Python in a process of its own and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_configuration_is_fetched_without_weights_and_weights_when_they_are_asked_for(endpoint):
    _Endpoint.fetched.clear()
    code = """
from jaxlm import api, config
model = api.load("hf:ORG/stories")
print(model.config.d_model, config.load("hf:ORG/stories@main", kind="decode").model == model.config)
"""
    assert run(code, endpoint) == "64 True\n"
    assert "config.json" in _Endpoint.fetched and WEIGHTS not in _Endpoint.fetched
    code = """
from jaxlm import api
drawn = api.load("hf:ORG/stories", dtype="float32").generate([[1]], 20, temperature=0)
print(drawn[0].text)
"""
    assert (STORIES / "expected.txt").read_text().startswith(run(code, endpoint).strip())
    assert _Endpoint.fetched.count("config.json") == _Endpoint.fetched.count(WEIGHTS) == 1
    assert "pytorch_model.bin" not in _Endpoint.fetched
    code = """
from jaxlm.families import hub
hub.fetch_weights("hf:ORG/stories", folder := hub.fetch("hf:ORG/stories"))
print(sorted(file.name for file in folder.iterdir()))
"""
    assert WEIGHTS in run(code, {**endpoint, "HF_HUB_OFFLINE": "1"})


def test_what_cannot_be_fetched_is_one_line(endpoint):
    command = [sys.executable, "-m", "jaxlm", "import", "hf:ORG/another", "nowhere"]
    done = subprocess.run(command, env=endpoint, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "hf:ORG/another cannot be fetched: " in line


@pytest.mark.parametrize("name", ["hf:stories", "hf:ORG/stories/main", "hf:", "hf:../x@y z"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="is no model of the Hub; write hf:ORG/NAME"):
        hub.fetch(name)
