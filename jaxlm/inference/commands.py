"""Messages between the processes of one engine: calls of the first one's methods, as text."""

import json
from typing import Any, Literal, NamedTuple

from jaxlm.inference.grammar import Grammar
from jaxlm.inference.requests import Request, Sampling


class EngineCommand(NamedTuple):
    """A call of a method of the first process's engine, which the others repeat.

    Attributes:
      id: of the request that is submitted, cancelled or finished.
      request, priority, seed, salt: of a request that is submitted; the salt in hexadecimal digits.
    """

    method: Literal["submit", "cancel", "finish"]
    id: int
    request: Request | None = None
    priority: int = 0
    seed: int = 0
    salt: str = ""


def encode_commands(commands: list[EngineCommand]) -> str:
    """Return commands as the text that `decode_commands` reads."""
    described = [each._replace(request=each.request and _described(each.request)) for each in commands]
    return json.dumps(described)


def decode_commands(message: str) -> list[EngineCommand]:
    """Return the commands of a text."""
    commands = [EngineCommand(*fields) for fields in json.loads(message)]
    return [each._replace(request=each.request and _request(each.request)) for each in commands]


def _described(request: Request) -> Any:
    """Return a request as JSON has it."""
    described = request._asdict() | {"prompt": list(request.prompt), "stop": list(request.stop)}
    return described | {"stop_token_ids": sorted(request.stop_token_ids), "sampling": request.sampling._asdict()}


def _request(described: Any) -> Request:
    sampling = described["sampling"]
    if sampling["logit_bias"] is not None:  # JSON turns the ids into texts
        sampling["logit_bias"] = {int(id): bias for id, bias in sampling["logit_bias"].items()}
    grammar = described["grammar"] and Grammar(*described["grammar"])
    return Request(**{**described, "sampling": Sampling(**sampling), "grammar": grammar})
