"""Stop strings in a text that comes in pieces."""

import itertools

import pytest

from jaxlm.inference.stop_strings import StopScanner


def before_stop(text, stops):
    """A text up to the first of these strings in it; all of it where there is none."""
    return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two", [], "one two"),
        ("one two", ["three", ""], "one two"),
        ("one two", ["two", " t"], "one"),
        ("one two", ["one"], ""),
        ("aabaac", ["aac"], "aab"),
        ("ababac", ["abac", "bab"], "a"),
        ("a stop", ["stopped"], "a stop"),
    ],
)
def test_a_text_ends_before_its_first_stop_however_it_is_cut(text, stops, expected):
    assert before_stop(text, stops) == expected
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(len(text)), n) for n in range(4)):
        scanner, written = StopScanner(stops), ""
        for first, last in itertools.pairwise([0, *cuts, len(text)]):
            written += scanner.add(text[first:last])
            assert expected.startswith(written)  # nothing is taken back
            if scanner.found:
                break
        assert written + scanner.rest() == expected
        assert scanner.found == (expected != text)


def test_text_that_begins_no_stop_is_not_held_back():
    scanner = StopScanner(["\n\n", "END"])
    assert [scanner.add(piece) for piece in ("one", "\n", "two E", "N", "d")] == ["one", "", "\ntwo ", "", "ENd"]
