"""The base of all tables of requests. Imports no JAX."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic import model_validator as validator
from pydantic_core import PydanticCustomError


class RequestBody(BaseModel):
    """A table of a request. Unknown parameters are refused, with the nearest name.

    Attributes:
      elsewhere: names that other servers know, and what says the same here.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    elsewhere: ClassVar[Mapping[str, str]] = {}

    @validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        if isinstance(values, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in values:
                if name not in known:
                    near = difflib.get_close_matches(str(name), known, 1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    hint = f"; {cls.elsewhere[name]}" if name in cls.elsewhere else hint
                    message = f"unknown parameter {name!r}{hint}"
                    raise PydanticCustomError("unknown_parameter", "{message}", {"message": message, "name": name})
        return values
