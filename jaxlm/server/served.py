"""The model that a server serves, and the limits of what it is asked."""

import hashlib
import hmac
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import NamedTuple

from anyio import CapacityLimiter, to_thread

from jaxlm.costs.serving import TokenCost
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.grammar import CompiledGrammar, Grammar
from jaxlm.inference.requests import Sampling
from jaxlm.inference.service import EngineService
from jaxlm.parallel.layout import Layout
from jaxlm.server.answers.answer_formats import AnswerFormat, form_of
from jaxlm.server.refusals import Refusal, refusing

_COMPILING = 2  # grammars at a time


@dataclass(frozen=True)
class ServerLimits:
    """The most that one request may take.

    Attributes:
      body_bytes: of its body.
      seconds: from its arrival to the end of its answer.
      stalled_seconds: that a step of the engine may take before the server calls itself unhealthy.
    """

    body_bytes: int = 8 << 20
    seconds: float = 3600.0
    stalled_seconds: float = 60.0


class Caller(NamedTuple):
    """A caller: `salt` keeps what they say from being found in the cache by others."""

    salt: bytes = b""


@dataclass(frozen=True)
class ServedModel:
    """A model under its name, with the service that runs it.

    Attributes:
      chat_template: None where the model has no template, and answers no messages.
      sampling: the sampling where a request leaves it open.
      cost: the counted cost of a token.
      exact: whether a request has the same numbers to the bit whatever is served beside it (`Engine.check`).
      keys: of the API, of which each request must show one; without keys a request shows none.
      created: seconds since 1970.
      adapter: the adapter that answers under this name; None where the model itself does.
      adapted: the same model with each of its adapters, under their names.
    """

    name: str
    service: EngineService
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    sampling: Sampling = Sampling()
    cost: TokenCost | None = None
    exact: bool = False
    limits: ServerLimits = ServerLimits()
    keys: Collection[str] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    adapter: str | None = None
    adapted: "Sequence[ServedModel]" = ()

    @property
    def all(self) -> "list[ServedModel]":
        """The model, and then the same one with each of its adapters."""
        return [self, *self.adapted]

    def named(self, name: str | None) -> "ServedModel":
        """Return what is served under a name; the model itself for None. Raises Refusal for a name that is not
        served."""
        by_name = {each.name: each for each in self.all}
        if name is not None and name not in by_name:
            raise Refusal(
                f"there is no model {name!r} here; it has {', '.join(map(repr, by_name))}",
                404,
                param="model",
                code="model_not_found",
            )
        return self if name is None else by_name[name]

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """A function that returns the bytes of a token."""
        return lru_cache(1 << 16)(self.tokenizer.bytes_of)

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        """The form of answers that the chat template shows; None for text alone."""
        return self.chat_template and form_of(self.chat_template)

    @property
    def longest(self) -> int:
        """The most tokens of a prompt with its continuation, but for the last."""
        return self.service.engine.longest

    @property
    def dtype(self) -> str:
        """The dtype that is computed in."""
        return str(self.service.engine.runner.programs.dtype)

    @property
    def quantize(self) -> str | None:
        """The form of the matrices of layers; None where they are in the dtype."""
        quantized = self.service.engine.runner.programs.quantized
        return None if quantized is None else str(quantized)

    @property
    def cache_dtype(self) -> str | None:
        """The dtype of keys and values; None where they are not of eight bits."""
        return self.service.engine.settings.cache_dtype

    @property
    def speculate(self) -> str | None:
        """The name of the source of drafts, with the most drafts in a step; None without drafts."""
        speculation = self.service.engine.settings.speculation
        return speculation and f"{PurePath(speculation.source).name}:{speculation.drafts}"

    @property
    def layout(self) -> Layout:
        """The devices along each axis of the mesh."""
        return Layout(self.service.engine.runner.programs.mesh.shape)

    async def compiled(self, grammar: Grammar, param: str) -> CompiledGrammar:
        """Return a grammar compiled, in a thread that nothing but grammars waits for. Raises Refusal for one that
        cannot be used, naming the parameter."""
        grammars = self.service.engine.grammars
        assert grammars is not None, "a server has a tokenizer"
        with refusing(param, f"{param}: "):
            if (kept := grammars.kept(grammar)) is not None:
                return kept
            return await to_thread.run_sync(grammars.compile, grammar, limiter=self._compiling)

    @cached_property
    def _compiling(self) -> CapacityLimiter:
        """The threads that compile grammars: fewer than the machine has for all else."""
        return CapacityLimiter(_COMPILING)

    def room(self, prompt_tokens: int) -> int:
        """Return how many tokens may follow a prompt; the last one is drawn and never read. At least 1, for a prompt
        that is too long to be refused as such."""
        return max(self.longest - prompt_tokens + 1, 1)

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller who sends this header. Raises Refusal for a header without one of the keys, which are
        compared in constant time."""
        if not self.keys:
            return Caller()
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, _digest(key)) for key in self.keys]  # all keys, whichever matches
        if scheme.lower() != "bearer" or not any(matches):
            raise Refusal(
                "a key of this server is missing or wrong; send it as Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return Caller(digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
