"""A server in a process of its own, for the length of a load. Imports no JAX."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxlm.core import plugins
from jaxlm.core.errors import InputError, RunFailed

_END_S = 60.0  # until a server that is told to end is killed


@contextmanager
def local_server(model: Path, overrides: Sequence[str], options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Serve a model over loopback, with these options of `jaxlm serve`, and yield its address and the dtype that it
    computes in. The server's errors go to standard error. Raises InputError and RunFailed as it ends."""
    command = [sys.executable, "-m", "jaxlm", "serve", str(model), *overrides, *options, "--port", "0", "--json"]
    command += [word for plugin in plugins.of_command() for word in ("--import", plugin.name)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            failure = InputError if server.wait() == 2 else RunFailed
            raise failure(f"jaxlm serve {model} ended with status {server.returncode}, for the reason above")
        ready = json.loads(line)
        yield ready["url"], ready["dtype"]
    finally:
        server.terminate()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
