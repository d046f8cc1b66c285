"""Bodies of requests: what each may hold, refused by name otherwise. Imports no JAX.

Values that clients send unasked and that change nothing are accepted; nothing else is taken and ignored.
"""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from jaxlm.core.errors import InputError
from jaxlm.core.explain import message_of
from jaxlm.inference.grammar import Grammar
from jaxlm.inference.requests import MAX_LOGPROBS, MAX_SEED, MIN_SEED, Sampling
from jaxlm.server.formats import ResponseFormat, StructuredOutputs
from jaxlm.server.refusals import Refusal
from jaxlm.server.request_body import RequestBody

Body = TypeVar("Body", bound="RequestBody")

_MEMBER = re.compile(r"str|(list|dict)\[.*\]")  # of a union, in the place of an error

Seed = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)]
Salt = Annotated[str, Field(min_length=1)]  # an empty one would be none

# Names of forms that other servers take, or took.
_FORMS = {
    "guided_json": 'give structured_outputs = {"json": …}, or response_format of the type "json_schema"',
    "guided_regex": 'give structured_outputs = {"regex": …}',
    "guided_choice": 'give structured_outputs = {"choice": […]}',
    "guided_grammar": 'give structured_outputs = {"grammar": …}, a Lark grammar',
    "guided_whitespace_pattern": 'give structured_outputs = {"json": …, "whitespace_pattern": …}',
    "json_schema": 'give response_format = {"type": "json_schema", "json_schema": {"name": …, "schema": …}}',
    "regex": 'give structured_outputs = {"regex": …}',
    "grammar": 'give structured_outputs = {"grammar": …}, a Lark grammar',
}

MAX_STOPS = 16  # stop strings of a request
MAX_CHOICES = 128  # continuations of a prompt, as many as OpenAI's API gives


def neutral(*values: Any, why: str) -> Any:
    """Return the type of a parameter of which only values that change nothing are supported; None is always supported.

    Args:
      values: lists, tables and scalars.
      why: it is not supported, after "is not supported: ".
    """
    shown = " or ".join(["null", *map(json.dumps, values)])

    def check(value: Any) -> Any:
        if value is None or any(_is_number(value) == _is_number(known) and value == known for known in values):
            return value
        raise PydanticCustomError("unsupported", f"is not supported: {why}; leave it out, or give {shown}")

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": [None, *values]})]


def in_words(words: str) -> WrapValidator:
    """Return a validator that says in words what a union takes, in place of an error for each of its members."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("wrong_type", f"must be {words}") from None

    return WrapValidator(check)


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send the tokens that were read and drawn, in a chunk before the last."""
    include_obfuscation: neutral(False, why="nothing is padded against observers of the network") = None


class SamplingBody(RequestBody):
    """The parameters of every request for text."""

    model: str
    """The model's name, as /v1/models gives it."""
    temperature: float | None = None
    """0 takes the likeliest token."""
    top_p: float | None = None
    """Draw among the fewest tokens that hold this much of the probability."""
    top_k: int | None = None
    """Draw among the likeliest tokens; 0 and -1 among all."""
    min_p: float | None = None
    """Draw among tokens at least this many times as likely as the likeliest; 0 among all."""
    stream: bool | None = None
    """Send text as it is drawn, by server-sent events."""
    stream_options: StreamOptions | None = None
    """Of a stream alone."""
    user: str | None = None
    """A name for the caller's end user; nothing depends on it."""
    metadata: dict[str, Any] | None = None
    """Notes of the caller; nothing depends on them."""
    store: neutral(False, why="nothing is stored") = None

    @property
    def includes_usage(self) -> bool:
        """Return whether a stream ends with its usage. Raises Refusal for options of a stream without one."""
        if self.stream_options is not None and not self.stream:
            raise Refusal("stream_options are those of a stream; add stream = true", param="stream_options")
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, published: Sampling, logprobs: int | None) -> Sampling:
        """Return how tokens are drawn; what the body leaves open is as `published`. Raises Refusal for values without
        meaning."""
        options = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        values = {name: value for name in options if (value := getattr(self, name, None)) is not None}
        if (bias := getattr(self, "logit_bias", None)) is not None:
            values["logit_bias"] = bias or None
        if self.top_k is not None:
            values["top_k"] = None if self.top_k in (0, -1) else self.top_k
        if self.min_p is not None:
            values["min_p"] = self.min_p or None
        try:
            return published._replace(**values, logprobs=logprobs).check()
        except InputError as error:
            raise Refusal(str(error), param=str(error).partition(" ")[0]) from None


class DrawingBody(SamplingBody):
    """The parameters of requests for completions and answers."""

    elsewhere = _FORMS

    repetition_penalty: float | None = None
    """Divide positive logits of tokens before by this, and multiply others."""
    presence_penalty: float | None = None
    """Subtract this from logits of tokens that were drawn before."""
    frequency_penalty: float | None = None
    """Subtract this for each time that a token was drawn."""
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = None  # JSON's names are texts
    """What is added to the logits of token ids."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Continuations of each prompt."""
    seed: Seed | None = None
    """Of the random numbers: the same request has the same answer, whatever is served beside it. Without it each
    prompt has another."""
    stop: Annotated[
        str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None,
        in_words(f"a text, or a list of at most {MAX_STOPS} texts"),
    ] = None
    """The text ends before the first of these; the name of a control token ends it where the model writes the token,
    which is no part of the text."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1024)] | None = None
    """Ids that end the text too."""
    ignore_eos: bool | None = None
    """The model's own ids end no text: it has `max_tokens` tokens, but for `stop` and `stop_token_ids`."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Draw at least so many tokens before `stop`, `stop_token_ids` or the model's own ids may end the text (0)."""
    include_stop_str_in_output: bool | None = None
    """The text ends with the stop string that ended it, or with the text of the id that did."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep the last so many tokens of a longer prompt, behind the ids that begin a document; -1 keeps as many as leave
    room for what is asked for."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Give the log-probability and the rank of each token of the prompt, and of so many likeliest ones in its place."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Texts of a smaller priority are drawn sooner; other texts wait, or begin again later (0)."""
    cache_salt: Salt | None = None
    """Prefixes of prompts are found again under one salt alone; keys of the API are salts already."""
    response_format: ResponseFormat | None = None
    """The form of a text: any, an object of JSON, or the values of a JSON schema."""
    structured_outputs: StructuredOutputs | None = None
    """The form of a text, as vLLM's server takes it: a JSON schema, a regular expression, a choice, a grammar."""

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that a text is held to. Raises Refusal where two are given, and for a form without meaning."""
        grammar = self.response_format and self.response_format.grammar
        if self.structured_outputs is None:
            return grammar
        if grammar is not None:
            raise Refusal("structured_outputs and response_format say the same; give one", param="structured_outputs")
        return self.structured_outputs.held

    @property
    def grammar_param(self) -> str:
        """The parameter that has the grammar."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        if "" in stops:
            raise Refusal("stop = '' would end every text; give at least one character", param="stop")
        return stops


def drawing(body: DrawingBody) -> dict[str, Any]:
    """Return what a body says of how many texts are drawn and what ends them, as `CompletionRequest` has it."""
    return {
        "n": body.n or 1,
        "seed": body.seed,
        "stop": body.stops,
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "ignores_stop_tokens": bool(body.ignore_eos),
        "min_tokens": body.min_tokens or 0,
        "includes_stop": bool(body.include_stop_str_in_output),
        "scores": body.prompt_logprobs,
        "ranks": body.prompt_logprobs is not None,
        "priority": body.priority or 0,
        "salt": body.cache_salt,
    }


def parsed(body: type[Body], content: bytes) -> Body:
    """Return the body of a request. Raises Refusal for what is no JSON, or not what the body may hold."""
    try:
        return body.model_validate_json(content)
    except ValidationError as error:
        raise _refusal(error) from None
    except RecursionError:
        raise Refusal("the body is nested too deeply", code="invalid_json") from None


def _refusal(error: ValidationError) -> Refusal:
    """Return the first of the errors as one line that begins with the parameter; of a union's, the deepest."""
    errors = error.errors(include_url=False, include_input=False)
    first = max((each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]), key=lambda each: len(each["loc"]))
    place = ".".join(str(part) for part in first["loc"] if not _MEMBER.fullmatch(str(part)))
    message = message_of(first)
    match first["type"]:
        case "json_invalid":
            return Refusal(f"the body is not valid JSON: {message}", code="invalid_json")
        case "unknown_parameter":
            param = f"{place}.{first['ctx']['name']}".lstrip(".")
            return Refusal(f"{place}: {message}" if place else message, param=param, code="unknown_parameter")
        case "unsupported":
            return Refusal(f"{place} {message}", param=place, code="unsupported_parameter")
        case "too_short" | "string_too_short" if first["ctx"]["min_length"] == 1:
            return Refusal(f"{place} must not be empty", param=place)
        case "missing":
            return Refusal(f"{place} is missing", param=place, code="missing_parameter")
    return Refusal(f"{place}: {message}" if place else message, param=place or None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
