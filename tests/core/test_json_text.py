"""JSON that any reader takes."""

import json

import pytest

from jaxlm.core.json_text import json_text, json_value


@pytest.mark.parametrize("value", ["hi \ud83d", {"\udc00": ["\ud83d", "😀", 'é"\\\n']}, 1.5, None, {}])
def test_json_is_text_of_utf8_and_the_same_value(value):
    text = json_text(value)
    text.encode()
    assert json.loads(text) == value == json_value(text)


def test_only_half_characters_are_escaped():
    assert json_text({"é": "\ud83d😀"}) == '{"é": "\\ud83d😀"}'


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999", "-1e999", "{", ""])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError):
        json_value(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_has_not_are_not_written(value):
    with pytest.raises(ValueError):
        json_text(value)
