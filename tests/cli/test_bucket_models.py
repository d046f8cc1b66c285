"""Published models in buckets and on the Hub: read, imported and exported as those of this machine are."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import bucket_servers
import pytest
from bucket_servers import BUCKET
from story_fixtures import STORIES

from jaxlm import api, config
from jaxlm.core import buckets
from jaxlm.core.addresses import place
from jaxlm.core.errors import InputError
from jaxlm.data.config import DataConfig
from jaxlm.data.sources import find_sources

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module", params=bucket_servers.SCHEMES)
def bucket(request):
    with bucket_servers.serving(request.param):
        url = f"{request.param}://{BUCKET}"
        for file in STORIES.iterdir():
            buckets.upload(file, f"{url}/stories/{file.name}")
        yield url


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def move(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("machine")
    return move


def test_a_published_model_in_a_bucket_is_opened_imported_and_exported(bucket, machine, tmp_path):
    stories, run, out = (f"{bucket}/{name}" for name in ("stories", "runs/stories", "exported"))
    model = api.load(stories)
    assert str(model.source) == stories and model.experiment == api.load(STORIES).experiment
    assert config.load(stories, kind="decode").model == config.load(STORIES, kind="decode").model
    assert model.source.text.load_tokenizer().vocab_size == 512
    assert not (place(stories) / WEIGHTS).exists()
    assert model.source.weights.digest() == api.load(STORIES).source.weights.digest()
    assert model.source.weights.origin().source == stories

    api.import_run(stories, run)
    machine("another")
    imported = api.load(run)
    assert imported.experiment.data.tokenizer == f"{run}/tokenizer.json"
    assert imported.source.run.begun_from.source == stories
    (listed,) = api.runs(bucket)
    assert (listed.run, listed.state, listed.begun_from) == (run, "imported", stories)

    machine("a third")
    api.export(run, out)
    api.export(STORIES, tmp_path / "here")
    for file in (tmp_path / "here").iterdir():
        with buckets.open_binary(f"{out}/{file.name}") as stream:
            assert stream.read() == file.read_bytes(), file.name
    machine("a fourth")
    assert api.load(out).source.weights.digest() == api.load(tmp_path / "here").source.weights.digest()
    for make in (lambda: api.export(run, out), lambda: api.import_run(stories, run)):
        with pytest.raises(InputError, match="exists already; give another folder"):
            make()


def test_a_model_that_changes_in_its_bucket_is_read_again(bucket, machine):
    url = f"{bucket}/changing/config.json"
    whole = json.loads((STORIES / "config.json").read_text())
    for layers in (whole["num_hidden_layers"], 2):
        buckets.write(url, json.dumps({**whole, "num_hidden_layers": layers}).encode())
        assert config.load(f"{bucket}/changing", kind="decode").model.num_layers == layers


class _Hub(BaseHTTPRequestHandler):
    """Serves one repository as the Hub serves it to its file system."""

    files = {file.name: file.read_bytes() for file in STORIES.iterdir()} | {"text.jsonl": b'{"text": "of the Hub"}\n'}

    def do_HEAD(self):
        self._answer(None)

    def do_GET(self):
        self._answer(None)

    def do_POST(self):
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, asked):
        path = unquote(urlsplit(self.path).path)
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/ORG/stories/tree/"):
            self._send(json.dumps([self._described(name) for name in self.files]).encode())
        elif path.startswith("/api/models/ORG/stories/paths-info/"):
            wanted = asked.decode()
            self._send(json.dumps([self._described(name) for name in self.files if name in wanted]).encode())
        elif path.startswith("/api/models/ORG/stories"):
            self._send(json.dumps({"id": "ORG/stories", "sha": "5f1c" * 10, "siblings": []}).encode())
        elif path.startswith("/ORG/stories/resolve/") and name in self.files:
            self._send(self.files[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _described(self, name):
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _send(self, content):
        first, last = 0, len(content) - 1
        if asked := self.headers.get("Range"):
            first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("ETag", hashlib.sha1(content).hexdigest())
        self.send_header("X-Repo-Commit", "5f1c" * 10)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(part)

    def log_message(self, *arguments):
        pass


def test_a_model_and_text_of_the_hub_are_read_by_address(machine, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(
        pytest.importorskip("huggingface_hub.constants"), "HF_HUB_OFFLINE", False
    )  # read when it was imported
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = huggingface_hub.HfFileSystem(
        endpoint=f"http://127.0.0.1:{server.server_port}", use_listings_cache=False, skip_instance_cache=True
    )
    monkeypatch.setattr(buckets, "filesystem", lambda scheme: hub)
    assert api.load("hf://ORG/stories").source.weights.digest() == api.load(STORIES).source.weights.digest()
    (source,) = find_sources(DataConfig(text="hf://ORG/stories/*.jsonl"), print)
    assert [str(file).endswith("hf/ORG/stories/text.jsonl") for file in source.files] == [True]
    with buckets.open_binary("hf://ORG/stories/text.jsonl") as file:
        assert file.read() == _Hub.files["text.jsonl"]
    with pytest.raises(InputError, match="hf://ORG/other cannot be written: jaxlm reads the Hub"):
        api.export(STORIES, "hf://ORG/other")
    server.shutdown()
