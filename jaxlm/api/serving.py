"""A model behind HTTP: its engine ready, and the server composed of it."""

import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxlm.core.errors import InputError, RunFailed

if TYPE_CHECKING:
    from jaxlm.api.model import LoadedModel
    from jaxlm.costs.serving import TokenCost
    from jaxlm.inference.engine import Engine
    from jaxlm.server.served import ServedModel, ServerLimits

Progress: TypeAlias = Callable[[str], AbstractContextManager]  # shows what is being done for the length of a block


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server.

    Attributes:
      name: the model's name for clients; None is ORG/NAME of a model of the Hub, or the name of its folder.
      keys: of the API, one of which each request must show; without any, none.
      limits: the most that one request may take; None is the default of `ServerLimits`.
      drain_seconds: that requests under way may take at the end.
      template_variables: of the chat template, in place of its own.
      must_be_exact: refuse to serve where a text's numbers depend, in any bit, on what is served beside it.
    """

    name: str | None = None
    keys: Collection[str] = ()
    limits: "ServerLimits | None" = None
    drain_seconds: float = 30.0
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    must_be_exact: bool = False


class Server:
    """A server of one model, which `run` lets listen.

    Attributes:
      name: of the model.
      adapters: the names of its adapters, each a model for clients.
      exact: whether a text's numbers are the same to the bit, whatever is served beside it.
      dtype: that is computed in.
      quantize: the form of the matrices of layers; None where they are in the dtype.
      cache_dtype: of keys and values; None where they are not of eight bits.
      speculate: the name of the source of drafts, with the most drafts in a step; None without drafts.
      layout: the devices along each axis of the mesh.
    """

    def __init__(self, model: "LoadedModel", engine: "Engine", exact: bool, settings: ServerSettings):
        from jaxlm.inference import leader
        from jaxlm.inference.service import EngineService
        from jaxlm.server.app import make_app
        from jaxlm.server.metrics import ServerMetrics
        from jaxlm.server.process import DrainingServer
        from jaxlm.server.served import ServedModel, ServerLimits

        assert model.tokenizer is not None
        template, sampling = model.chat_template_if_any, model.sampling()
        if settings.template_variables:
            template = model.chat_template.with_kwargs(settings.template_variables)
        self._end_others, metrics = leader.lead(engine), ServerMetrics()
        self._service = EngineService(engine, metrics, lambda: self._http.end())
        metrics.watch(self._service)
        self.name, self.exact, self.adapters = _checked_name(model, settings), exact, [*model.adapters]
        served = ServedModel(
            self.name,
            self._service,
            model.tokenizer,
            template,
            sampling,
            _cost(model, engine),
            exact,
            settings.limits or ServerLimits(),
            settings.keys,
        )
        adapted = [self._adapted(model, settings, served, name) for name in self.adapters]
        served = replace(served, adapted=adapted)
        self.dtype, self.layout = served.dtype, served.layout
        self.quantize, self.cache_dtype, self.speculate = served.quantize, served.cache_dtype, served.speculate
        self._http = DrainingServer(make_app(served, metrics), self._service, settings.drain_seconds)

    def _adapted(
        self, model: "LoadedModel", settings: ServerSettings, served: "ServedModel", adapter: str
    ) -> "ServedModel":
        template = model.chat_template_of(adapter)
        if template is not None and settings.template_variables:
            template = template.with_kwargs(settings.template_variables)
        return replace(served, name=adapter, adapter=adapter, chat_template=template, cost=None)

    def run(
        self,
        address: "str | socket.socket" = "127.0.0.1",
        port: int = 8000,
        ready: Callable[[], None] = lambda: None,
    ) -> int | None:
        """Serve until SIGTERM or SIGINT, which lets it finish what it has taken, and return the signal; a second one
        ends it. Call it in the main thread.

        Args:
          address: to listen on, or a bound socket.
          port: of the address; 0 takes one that is free.
          ready: called once it listens.

        Raises OSError for an address that cannot be had, and RunFailed where the engine fails.
        """
        from jaxlm.server.process import listen

        with address if isinstance(address, socket.socket) else listen(address, port) as listening:
            self._http.serve_on(listening, ready)
        self._end_others()
        if self._service.failure:
            raise RunFailed(self._service.failure)
        return self._http.signal


def serve(
    model: "LoadedModel", settings: ServerSettings = ServerSettings(), *, progress: Progress = nullcontext
) -> Server:
    """Return a server of a model over HTTP, as clients of OpenAI's API speak it, its programs compiled.

    Args:
      model: as `load` returns it; `model.settings` are those of its engine.
      progress: takes what is being done, and returns a context for it.

    Raises InputError for a model without a tokenizer, and for adapters that do not fit it or have its name; RunFailed
    for one that must be exact and is not.
    """
    _checked_name(model, settings)
    engine, exact = ready_engine(model, progress)
    if settings.must_be_exact and not exact:
        raise RunFailed("programs of other sizes compute a row otherwise here, in some bit; serve without --exact")
    return Server(model, engine, exact, settings)


def ready_engine(model: "LoadedModel", progress: Progress = nullcontext) -> "tuple[Engine, bool]":
    """Return the engine of a model with all programs compiled, and whether it computes a row in one way. Every process
    of a job calls it."""
    from jaxlm.parallel import processes

    if model.tokenizer is None:
        raise InputError(f"{model.source} has no tokenizer, and a server speaks in texts; generate from --token-ids")
    engine = model.engine()
    processes.check_same("caches", {"pages": list(engine.runner.cache.counts)}, "give all the same --cache-memory")
    with progress(f"compiling {len(engine.runner.programs.shapes.all(scores=True))} programs"):
        engine.warm(scores=True)
    assert engine.grammars is not None, "it has a tokenizer"
    engine.grammars.warm()
    with progress("comparing what they compute"):
        return engine, engine.check()


def _cost(model: "LoadedModel", engine: "Engine") -> "TokenCost":
    """Return the cost of a token of a sequence that is half as long as it may be."""
    import jax

    from jaxlm.costs.hardware.target import of_devices
    from jaxlm.costs.serving import token_cost

    device, work = jax.devices()[0], model.decode_work(max(engine.longest // 2, 1))
    try:
        return token_cost(work, of_devices(device.device_kind, device.platform, work.layout.size))
    except InputError:  # chips that the catalog does not know, or a machine that is not calibrated
        return token_cost(work, None)


def _checked_name(model: "LoadedModel", settings: ServerSettings) -> str:
    """Return the name of a model. Raises InputError where it is that of an adapter."""
    if (name := settings.name or _name(str(model.source))) in model.adapters:
        raise InputError(f"an adapter and the model are both called {name}; give one of them another name")
    return name


def _name(source: str) -> str:
    """Return the name of a model: ORG/NAME of hf:ORG/NAME, or that of its folder."""
    return source.removeprefix("hf:") if source.startswith("hf:") else Path(source).resolve().name
