"""Messages between the processes of one engine: what was asked of the first, as text."""

import json
from typing import Any, Literal, NamedTuple

from jaxlm.inference.requests import Request, Sampling


class Told(NamedTuple):
    """A call of an engine's method, for the other processes.

    Attributes:
      id: of the request that is submitted, cancelled or finished.
      request, priority, seed, salt: of one that is submitted; the salt in hexadecimal digits.
    """

    method: Literal["submit", "cancel", "finish"]
    id: int
    request: Request | None = None
    priority: int = 0
    seed: int = 0
    salt: str = ""


def message_of(told: list[Told]) -> str:
    """Return the text of calls, which `told_by` reads."""
    return json.dumps([each._replace(request=each.request and _described(each.request)) for each in told])


def told_by(message: str) -> list[Told]:
    """Return the calls of a text."""
    each = [Told(*fields) for fields in json.loads(message)]
    return [told._replace(request=told.request and _request(told.request)) for told in each]


def _described(request: Request) -> Any:
    """Return a request as JSON has it."""
    ends = None if request.ends is None else sorted(request.ends)
    described = request._asdict() | {"prompt": list(request.prompt), "stop": list(request.stop), "ends": ends}
    return described | {"sampling": request.sampling._asdict()}


def _request(described: Any) -> Request:
    sampling = described["sampling"]
    if sampling["logit_bias"] is not None:  # of which JSON makes texts
        sampling["logit_bias"] = {int(id): bias for id, bias in sampling["logit_bias"].items()}
    return Request(**{**described, "sampling": Sampling(**sampling)})
