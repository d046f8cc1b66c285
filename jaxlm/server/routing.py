"""The choice of one of several servers of a model: that which has read the beginning of a prompt, unless it is busy.

A server finds keys of a prompt in its cache only where it has read the same beginning itself. So requests that begin
alike go to one server, as long as its load is near that of the others. Imports no JAX.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_PIECE = 256  # characters of a prompt that are compared at once
_KEPT = 1 << 16  # beginnings that are remembered of each server
_UNEVEN = 4  # requests more than the least busy server has, and a quarter of its own: then it is too busy


class PrefixRouter:
    """A router to so many servers, which are numbered from 0."""

    def __init__(self, servers: int):
        self.load = [0] * servers
        self._read: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(servers)]

    @contextmanager
    def routed(self, prompt: str, without: Collection[int] = ()) -> Iterator[int]:
        """Choose a server for a prompt, which is under way there for the length of the block. No server in `without` is
        chosen; at least one is not in it."""
        pieces = list(_beginnings(prompt))
        server = self._chosen(pieces, without)
        self._remember(server, pieces)
        self.load[server] += 1
        try:
            yield server
        finally:
            self.load[server] -= 1

    def forget(self, server: int) -> None:
        """Forget what a server has read: a new server has its place."""
        self._read[server].clear()

    def _chosen(self, pieces: Sequence[bytes], without: Collection[int]) -> int:
        there = [(i, load) for i, load in enumerate(self.load) if i not in without]
        least = min(load for _, load in there)
        near = [i for i, load in there if load - least <= max(_UNEVEN, load // 4)]
        return max(near, key=lambda i: (self._pieces_read(i, pieces), -self.load[i], -len(self._read[i])))

    def _pieces_read(self, server: int, pieces: Sequence[bytes]) -> int:
        """Return how many pieces of a prompt a server has read, from its beginning."""
        return next((n for n, piece in enumerate(pieces) if piece not in self._read[server]), len(pieces))

    def _remember(self, server: int, pieces: Sequence[bytes]) -> None:
        beginnings = self._read[server]
        for piece in pieces:
            beginnings[piece] = None
            beginnings.move_to_end(piece)
        while len(beginnings) > _KEPT:
            beginnings.popitem(last=False)


def prompt_of(content: bytes) -> str:
    """Return what the body of a request gives a model to read, as one text that others begin like; empty for a body
    that says nothing, which any server may refuse."""
    try:
        body: Any = json.loads(content)
        prompt = {key: body[key] for key in ("tools", "instructions", "messages", "prompt", "input") if body.get(key)}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ""
    return json.dumps(prompt, ensure_ascii=False)


def _beginnings(prompt: str) -> Iterator[bytes]:
    """Yield a digest of each beginning of a prompt that is whole pieces; of a shorter prompt, of all of it."""
    digest = hashlib.sha256()
    for at in range(0, max(len(prompt) - _PIECE + 1, 1), _PIECE):
        digest.update(prompt[at : at + _PIECE].encode("utf-8", "surrogatepass"))
        yield digest.digest()
