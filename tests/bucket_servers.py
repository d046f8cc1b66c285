"""Servers of buckets on this machine, of both protocols, and a proxy that cuts connections to them."""

import logging
import os
import random
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxlm.core import buckets

BUCKET = "jaxlm-tests"
SCHEMES = ("gs", "s3")


class Proxy:
    """A server that forwards each connection to a port of this machine, and cuts some of them.

    `cuts`: of so many of the next connections, each after `after` bytes of the answer, or of the request.
    """

    def __init__(self, port: int):
        self.cuts, self.after, self.connections = 0, 0, 0
        self._port, self._server = port, socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            cut = self.cuts > 0
            self.cuts -= cut
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except ConnectionRefusedError:
                client.close()
                continue
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, target, cut), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, cut: bool) -> None:
        left = self.after
        try:
            while content := source.recv(2**16):
                target.sendall(content[:left] if cut else content)
                left -= len(content)
                if cut and left <= 0:
                    break
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._server.close()


class Away:
    """A file system that answers each question with an error."""

    def __init__(self, error: Exception | None = None):
        self._error = error or ConnectionResetError("connection reset by peer")

    def info(self, path: str) -> None:
        raise self._error


@contextmanager
def serving(scheme: str) -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Serve an empty bucket. Yield the proxy before it, and the environment of processes that take it for the cloud."""
    if scheme == "gs":
        pytest.importorskip("gcsfs")
        server = pytest.importorskip("gcp_storage_emulator.server").create_server(
            "127.0.0.1", 0, in_memory=True, default_bucket=BUCKET
        )
        server.start()
        proxy = Proxy(server._api._httpd.server_address[1])
        names = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{proxy.port}"}
    else:
        pytest.importorskip("s3fs")
        server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        proxy = Proxy(server.get_host_and_port()[1])
        names = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    buckets.filesystem.cache_clear()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    try:
        if scheme == "s3":
            urllib.request.urlopen(f"{names['AWS_ENDPOINT_URL']}/moto-api/reset", data=b"").close()
            buckets.filesystem("s3").mkdir(BUCKET)
        yield proxy, names
    finally:
        buckets.filesystem.cache_clear()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        proxy.close()
        server.stop()


def content(size: int) -> bytes:
    """Return bytes that no other size begins with."""
    return random.Random(size).randbytes(size)
