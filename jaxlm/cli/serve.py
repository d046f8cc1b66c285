"""Serve a model over HTTP, for clients of OpenAI's API.

The server listens once its programs are compiled. SIGTERM or Ctrl-C lets running requests finish; a second one stops at
once.
"""

import argparse
import importlib.util
import ipaddress
import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlm import api
from jaxlm.api import serving
from jaxlm.cli import chat, engine, trained
from jaxlm.cli.paths import path
from jaxlm.core import collector
from jaxlm.core.errors import InputError
from jaxlm.core.extras import install

if TYPE_CHECKING:
    import socket

    from jaxlm.api import LoadedModel
    from jaxlm.api.serving import Progress
    from jaxlm.parallel.processes import ProcessSpec

_NEEDS = ("starlette", "uvicorn", "prometheus_client", "llguidance")


# The same for all processes.
_SIZES = ("slots", "max_context", "cache_memory", "cache_dtype", "chunk_tokens", "speculate", "steps_per_dispatch")
_SAME = ("adapters", "overrides", "checkpoint", "ema", "quantize", *_SIZES, "dtype", "fast")

# Type, metavar, default and explanation of each limit.
_LIMITS = {
    "max-queued": (int, "N", 1024, "the most requests that wait; further ones get status 429 (%(default)s)"),
    "max-queued-tokens": (int, "N", 4_000_000, "the most prompt tokens of waiting requests (%(default)s)"),
    "max-body": (engine.memory, "SIZE", "8MiB", "the largest request body (%(default)s)"),
    "max-seconds": (float, "S", 3600.0, "the longest time a request may take (%(default)s)"),
    "stalled-seconds": (float, "S", 60.0, "the longest time a step may take before /health fails (%(default)s)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained.add_arguments(parser)
    engine.add_arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (%(default)s: this machine alone)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="the port to listen on (%(default)s; 0: any free one)"
    )
    parser.add_argument("--name", metavar="NAME", help="the name by which clients ask for the model (its folder's)")
    parser.add_argument(
        "--adapter",
        dest="adapters",
        type=_adapter,
        action="append",
        default=[],
        metavar="NAME=ADAPTER",
        help="also serve the model with this adapter, a run with [lora] or a PEFT directory, under a name of its own; "
        "may be given several times",
    )
    parser.add_argument(
        "--api-key-file",
        type=path,
        metavar="FILE",
        help="a file of API keys, one per line; each request must carry one of them",
    )
    chat.add_template_arguments(parser)
    for name, (kind, metavar, default, explanation) in _LIMITS.items():
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=explanation)
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="time for running requests to finish at the end (%(default)s)",
    )
    parser.add_argument(
        "--process",
        metavar="INDEX/COUNT@HOST:PORT",
        help="this process's place in a job of several, whose devices serve one model together, and the address of "
        "process 0, which listens (set by Slurm, Open MPI and Cloud TPU themselves)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="refuse to start where any bit of a result could depend on the requests served beside it",
    )


def main(arguments: argparse.Namespace) -> int:
    if any(importlib.util.find_spec(name) is None for name in _NEEDS):
        raise InputError(f"jaxlm serve needs the packages of a server: {install('serve')}")
    _check(arguments)
    from jaxlm.parallel import processes

    spec = None if arguments.process is None else processes.ProcessSpec.parse(arguments.process)
    keys = _keys(arguments.api_key_file) if arguments.api_key_file else []
    with processes.failing_as_one():
        _join(arguments, spec)
        if not processes.is_first():
            return _follow(arguments)
        with _bound(arguments) as listening:
            return _serve(arguments, keys, listening)


def _adapter(text: str) -> tuple[str, str]:
    name, separator, where = text.partition("=")
    if not (name and separator and where):
        raise argparse.ArgumentTypeError(f"{text!r} should be NAME=ADAPTER, such as poet=runs/poems")
    return name, where


def _join(arguments: argparse.Namespace, spec: "ProcessSpec | None") -> None:
    """Become a process of the job, all of which do the same. Raises InputError where they were asked for other
    things."""
    from jaxlm.parallel import processes

    processes.join(spec)
    if processes.process_count() > 1 and arguments.dtype == "auto":
        raise InputError("--dtype auto is measured by each process; give all the same one")
    asked = {name: getattr(arguments, name) for name in (*_SAME, *(name.replace("-", "_") for name in _LIMITS))}
    asked |= {"run": arguments.run.name, "COUNT": processes.process_count()}
    processes.check_same("settings", asked, "start all with the same MODEL, options and COUNT")


def _load(arguments: argparse.Namespace) -> "LoadedModel":
    """Return the model, the same in every process."""
    return engine.load(arguments, max_queued=arguments.max_queued, max_queued_tokens=arguments.max_queued_tokens)


def _progress(is_quiet: bool) -> "Progress":
    """Return what shows the progress of compiling."""
    from jaxlm.cli.progress import saying

    return nullcontext if is_quiet else saying


def _follow(arguments: argparse.Namespace) -> int:
    """Do what process 0 does, until it ends."""
    from jaxlm.inference import leader

    running, _ = serving.ready_engine(_load(arguments), _progress(is_quiet=True))
    leader.follow(running)
    return 0


def _serve(arguments: argparse.Namespace, keys: list[str], listening: "socket.socket") -> int:
    from jaxlm.server.process import url_of
    from jaxlm.server.served import ServerLimits

    settings = serving.ServerSettings(
        arguments.name,
        keys,
        ServerLimits(arguments.max_body, arguments.max_seconds, arguments.stalled_seconds),
        arguments.drain_seconds,
        arguments.chat_template_kwargs,
        must_be_exact=arguments.exact,
    )
    model = _load(arguments)
    server = api.serve(model, settings, progress=_progress(arguments.json))

    def ready() -> None:
        collector.begin_as_usual()
        url = url_of(listening)
        if arguments.json:
            line = {"url": url, "model": server.name, "exact": server.exact, "dtype": server.dtype}
            line |= {name: getattr(server, name) for name in ("quantize", "cache_dtype", "speculate")}
            print(json.dumps({**line, "mesh": {**server.layout}, "pid": os.getpid()}), flush=True)
            return
        kept = f", matrices in {server.quantize}" if server.quantize else ""
        kept += f", keys and values in {server.cache_dtype}" if server.cache_dtype else ""
        drafts = f", drafts of {server.speculate}" if server.speculate else ""
        how = f"{server.dtype}{kept}{drafts}, {server.layout}, exact: {'yes' if server.exact else 'no'}"
        names = ", ".join([server.name, *server.adapters])
        _say(f"serving {names} at {url}/v1 ({how}); Ctrl-C ends it")

    return 130 if server.run(listening, ready=ready) == signal.SIGINT else 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise InputError for limits without meaning, and for two adapters of one name."""
    names = [name for name, _ in arguments.adapters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--adapter {twice[0]}=… is given {names.count(twice[0])} times; give each a name of its own")
    for name in _LIMITS:
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None and not value > 0:
            raise InputError(f"--{name} {value} must be above 0")
    if not arguments.drain_seconds >= 0:
        raise InputError(f"--drain-seconds {arguments.drain_seconds} must be 0 or more")
    if not 0 <= arguments.port < 2**16:
        raise InputError(f"--port {arguments.port} must be from 0 to {2**16 - 1}")


def _keys(file: Path) -> list[str]:
    """Return the keys in a file. Raises InputError where it holds none, or one that a header cannot."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        raise InputError(f"--api-key-file {file} cannot be read: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise InputError(f"--api-key-file {file} must hold a key in each line, of ASCII characters without blanks")
    return keys


def _bound(arguments: argparse.Namespace) -> "socket.socket":
    """Return the socket of the server, before a model is loaded for nothing."""
    from jaxlm.server.process import listen

    try:
        listener = listen(arguments.host, arguments.port)
    except OSError as error:
        place = f"--host {arguments.host} --port {arguments.port}"
        raise InputError(f"{place}: {error.strerror or error}; choose another") from None
    if not arguments.api_key_file and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        _say("whoever reaches this address may use the model; --api-key-file asks for keys")
    return listener


def _say(line: str) -> None:
    print(f"jaxlm: {line}", file=sys.stderr, flush=True)
