"""Refusals of requests, as clients of OpenAI's API read them."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from jaxlm.core.errors import InputError, in_one_line
from jaxlm.inference.scheduler import Full, NeverFits
from jaxlm.inference.service import Draining, EngineFailed


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """An answer to a request that is refused or has failed."""

    error: ErrorDetail


class Refusal(Exception):
    """A request that is refused, or has failed, with an HTTP status.

    Args:
      message: one line that says what is wrong and what would be right.
      param: the parameter that is wrong.
      code: a name for programs.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.headers = message, status, param, code, headers or {}

    @property
    def body(self) -> ErrorAnswer:
        """The answer as JSON."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.body, self.status, self.headers)


@contextmanager
def refusing(param: str, where: str = "") -> Iterator[None]:
    """Raise Refusal in place of InputError, for a parameter; `where` stands before the message."""
    try:
        yield
    except InputError as error:
        raise Refusal(f"{where}{error}", param=param) from None


def refusal_of(error: BaseException, retry_after: int = 1) -> Refusal | None:
    """Return the refusal that an exception means; None for one that nobody expects.

    Args:
      retry_after: seconds after which a client may ask again where the queue is full.
    """
    match error:
        case Refusal():
            return error
        case NeverFits():
            return Refusal(str(error), param="max_tokens", code="context_length_exceeded")
        case InputError():
            return Refusal(str(error))
        case Full():
            return Refusal(str(error), 429, code="queue_full", headers={"Retry-After": str(retry_after)})
        case Draining():
            return Refusal(str(error), 503, code="draining", headers={"Retry-After": "5"})
        case EngineFailed():
            return Refusal(str(error), 500, code="engine_failed")
        case TimeoutError():
            return Refusal("the request took longer than the server allows; ask for less", 504, code="timeout")
    return None


def unexpected(error: Exception) -> Refusal:
    """Return the refusal of an exception that nobody expects, without what it may tell of this machine."""
    return Refusal(in_one_line(error) or f"the server has failed ({type(error).__name__})", 500, code="internal_error")
