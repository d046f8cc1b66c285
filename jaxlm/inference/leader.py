"""One engine over several processes: the first takes requests, and tells the others of them before each step.

Every process has the whole scheduler and plans the same steps, since each is told the same in the same order; nothing
else is sent but what the devices exchange.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxlm.inference.requests import Request, Sampling

if TYPE_CHECKING:
    from jaxlm.inference.engine import Engine


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


_END = ""

Send = Callable[[str], None]


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


def lead(engine: "Engine") -> Callable[[], None]:
    """Let the engine of the first process tell the others, before it is asked for anything. Returns what ends them."""
    from jaxlm.parallel import processes

    if processes.process_count() == 1:
        return lambda: None
    engine.tell(processes.tell_others)
    return lambda: processes.tell_others(_END)


def follow(engine: "Engine") -> None:
    """Step the engine of another process as the first steps its own, until that ends."""
    from jaxlm.parallel import processes

    while (message := processes.told_by_first()) != _END:
        for told in told_by(message):
            if told.method == "submit":
                assert told.request is not None
                salt = bytes.fromhex(told.salt)
                engine.submit(told.request, priority=told.priority, seed=told.seed, salt=salt)
            else:
                getattr(engine, told.method)(told.id)
        engine.step()
