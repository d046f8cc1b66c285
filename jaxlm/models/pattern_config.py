"""Layers of several blocks as a pattern of [model], whose entries patch the model's block. Imports no JAX."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from jaxlm.core.explain import explain
from jaxlm.core.schema import Count, Section, merged, without_none
from jaxlm.models.block_config import BlockConfig


class PatternEntryConfig(Section):
    """Layers of a pattern, one after another. Its other keys are a patch of a block's keys.

    The patch is merged into the keys of the model's block, as a file into its `model.base`. Gemma 3 has two entries:
    `name = "local", layers = 5, attention = { window = 512 }`, and `name = "global"`.
    """

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
    """Its name, unique in the pattern."""
    layers: Count | Literal["rest"] = 1
    """The number of its layers; "rest" takes all that are left."""

    def __hash__(self) -> int:
        return hash((self.name, self.layers))

    @property
    def patch(self) -> dict[str, Any]:
        """The keys of a block that it changes."""
        return self.model_extra or {}


class _Patched(Section):
    """The place of a merged block in a file, for the messages of its errors."""

    model: BlockConfig


def patched(base: Mapping[str, Any], patch: Mapping[str, Any], key: str) -> BlockConfig:
    """Return a block with a patch merged in. Raises ValueError in one line about the keys of the entry."""
    whole = {"model": without_none(merged(base, patch), [BlockConfig])}
    try:
        return _Patched.model_validate(whole).model
    except ValidationError as error:
        line = explain(error, _Patched, whole, set())
        raise ValueError(re.sub(rf"\bmodel\.({'|'.join(whole['model'])})\b", rf"{key}.\1", line)) from None
