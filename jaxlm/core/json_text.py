"""JSON that any reader takes: text of UTF-8, and no numbers that JSON does not have."""

import json
import math
import re
from typing import Any, NoReturn

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON can escape and UTF-8 cannot hold


def json_text(value: Any, ensure_ascii: bool = False, *, allow_nan: bool = False, **options: Any) -> str:
    """Return a value as JSON, in which half a character stays the escape that a text may have had it from.

    Args:
      options: of `json.dumps`.

    Raises ValueError for NaN and infinities unless they are allowed.
    """
    text = json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=allow_nan, **options)
    return _LONE_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is more than a number can be")
    return value


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""A decoder that raises ValueError for NaN, for infinities, and for numbers that would become infinite."""


def json_value(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for what is no JSON, NaN and Infinity among it."""
    return DECODER.decode(text)
