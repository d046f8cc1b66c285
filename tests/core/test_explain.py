"""Lines for errors of pydantic, which every file of jaxlm takes from one place."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, field_validator, model_validator

import jaxlm
from jaxlm.core.explain import first_line

ROOT = Path(jaxlm.__file__).parent


class Inner(BaseModel):
    number: int = 1

    @field_validator("number")
    @classmethod
    def _even(cls, value):
        if value % 2:
            raise ValueError("MUST be even")
        return value


class Outer(BaseModel):
    inner: Inner = Inner(number=2)
    other: int = 2

    @model_validator(mode="after")
    def _differ(self):
        if self.other == 3:
            raise ValueError("other must not be 3")
        return self


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"inner": {"number": 3}}, "inner.number: MUST be even"),
        ({"other": 3}, "other must not be 3"),
        ({"other": [4]}, "other: input should be a valid integer"),
    ],
)
def test_a_validator_s_own_text_stands_alone(values, line):
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(values)
    assert first_line(error.value) == line


def test_no_other_file_takes_the_text_of_an_error_of_pydantic():
    """Its message of a validator begins with words of pydantic's own."""
    taking = [file for file in ROOT.rglob("*.py") if '["msg"]' in file.read_text() or "['msg']" in file.read_text()]
    assert [str(file.relative_to(ROOT)) for file in taking] == ["core/explain.py"]
