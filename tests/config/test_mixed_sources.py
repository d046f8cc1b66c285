"""Several sources of text."""

from pathlib import Path

import pytest
from config_fixtures import CONTENT, SMALL, refusal

from jaxlm.config import load

MIXED = Path("mixed.toml")


SOURCES = """
[data.sources.web]
text = "web.jsonl.zst"
weight = 3

[data.sources.code]
text = ["code/", "more.py"]
field = "content"
"""


@pytest.fixture
def mixed(place):
    MIXED.write_text(CONTENT.replace('text = "stdlib"', "") + SOURCES)
    return MIXED


def test_sources_are_mixed_by_their_share_of_all_weights(mixed):
    described = load(mixed).data.described()
    assert list(described) == ["data.sources.web.text", "data.sources.code.text"]
    web, code = described.values()
    assert (web.text, web.field, web.weight) == (("web.jsonl.zst",), "text", 0.75)
    assert (code.text, code.field, code.weight) == (("code/", "more.py"), "content", 0.25)


def test_one_text_is_one_source():
    (source,) = load(SMALL, ["data.text=a.jsonl", "data.field=content"]).data.described().values()
    assert (source.text, source.field, source.weight) == (("a.jsonl",), "content", 1.0)


def test_what_is_said_for_all_sources_holds_where_one_says_nothing(mixed):
    web, code = load(mixed, ["data.field=body", "data.documents=7"]).data.described().values()
    assert (web.field, web.documents, code.field, code.documents) == ("body", 7, "content", 7)


def test_a_mixture_loads_back_the_same(mixed, tmp_path):
    written = tmp_path / "written.toml"
    written.write_text(load(mixed).to_toml())
    assert load(written) == load(mixed)


def test_sources_come_from_the_command_line_too(mixed):
    web, code, new = (
        load(mixed, ["data.sources.code.weight=9", "data.sources.new.text=n.txt"]).data.described().values()
    )
    assert (web.weight, code.weight, new.weight) == (3 / 13, 9 / 13, 1 / 13)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.text=a.txt", ["data.text and data.sources are both given"]),
        ("data.sources.web.weight=0", ["data.sources.web.weight = 0", "greater than 0"]),
        ("data.sources.web.text=[]", ["data.sources.web.text", "no text"]),
        ("data.sources.new.weight=1", ["data.sources.new", "text is missing"]),
        ("data.sources.web=a.txt", ["[data.sources.web]"]),
        ("data.sources.web.wait=1", ["did you mean data.sources.web.weight?"]),
        (
            "data.sources.web.tokenizer=bytes",
            ["unknown key data.sources.web.tokenizer", "did you mean data.tokenizer?"],
        ),
        ("data.sources.a b.text=a.txt", ["'a b'", "letters, digits"]),
    ],
)
def test_a_source_that_is_none_is_refused(mixed, override, says):
    said = refusal(override, path=mixed)
    assert not [part for part in says if part not in said], said
