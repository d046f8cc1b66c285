"""The base of every section of a configuration. Imports no JAX."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of an experiment's TOML file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)
