"""Models of the Hugging Face Hub, from an endpoint on this machine."""

import hashlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jax
import numpy as np
import pytest
import runs

from jaxlm.core.files import digest
from jaxlm.families import hub, peft
from jaxlm.families.directory import PublishedModel
from jaxlm.families.files import ADAPTER, ADAPTER_CONFIG
from jaxlm.models import tree
from jaxlm.models.lora_config import LoraConfig

STORIES = Path(__file__).parent / "stories260K"
COMMIT = "5f1c" * 10
WEIGHTS = "model.safetensors"


class _Endpoint(BaseHTTPRequestHandler):
    """Serves models as the Hub does, and records the files that are asked for."""

    fetched: list[str] = []
    models = {"ORG/stories": {"pytorch_model.bin": b"not to be fetched"}}

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        asked = unquote(urlsplit(self.path).path)
        model = next((model for model in self.models if f"/{model}/" in asked), "")
        files = self.models.get(model, {})
        if asked.startswith(f"/api/models/{model}/revision/"):
            self._send(json.dumps({"id": model, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}))
        elif asked.startswith(f"/api/models/{model}/tree/"):
            listed = [{"type": "file", "path": f, "size": len(x), "oid": _etag(x)} for f, x in files.items()]
            self._send(json.dumps(listed))
        elif asked.startswith(f"/{model}/resolve/") and (name := asked.rpartition("/")[2]) in files:
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
    _Endpoint.models["ORG/stories"] |= {file.name: file.read_bytes() for file in STORIES.iterdir()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    yield {
        **runs.environment(),
        **names,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
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
    tokens = json.loads((STORIES / "stories260K_tokens.json").read_text())["tokens"][:20]
    code = f"""
from jaxlm import api
print(api.load("hf:ORG/stories", dtype="float32").logits([{tokens[:-1]}])[0].argmax(axis=-1).tolist())
"""
    assert json.loads(run(code, endpoint)) == tokens[1:]  # of the likeliest story
    assert _Endpoint.fetched.count("config.json") == _Endpoint.fetched.count(WEIGHTS) == 1
    assert "pytorch_model.bin" not in _Endpoint.fetched
    code = """
from jaxlm.families import hub
hub.fetch_weights("hf:ORG/stories", folder := hub.fetch("hf:ORG/stories"))
print(sorted(file.name for file in folder.iterdir()))
"""
    assert WEIGHTS in run(code, {**endpoint, "HF_HUB_OFFLINE": "1"})


def test_an_adapter_is_fetched_with_the_model_that_it_names(endpoint, tmp_path):
    base, lora = PublishedModel(STORIES), LoraConfig(rank=2)
    shapes = tree.shapes(tree.trained(tree.abstract(base.model, lora)[1])[0])
    adapters = jax.tree.map(lambda leaf: np.random.default_rng(0).normal(size=leaf.shape), shapes)
    peft.write(tmp_path / "a", base.model, base.family, lora, adapters, {"base_model_name_or_path": "ORG/stories"})
    _Endpoint.models["ORG/adapter"] = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    code = """
from pathlib import Path
from jaxlm.runs.published import PublishedSource
source = PublishedSource(Path("hf:ORG/adapter"))
print(source, source.weights.origin().pinned, source.weights.digest(), source.text.load_tokenizer().vocab_size)
"""
    digests = f"{digest([tmp_path / 'a' / ADAPTER, tmp_path / 'a' / ADAPTER_CONFIG])}+{base.digest()}"
    assert run(code, endpoint) == f"hf:ORG/adapter hf:ORG/adapter@{COMMIT} {digests} 512\n"


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
