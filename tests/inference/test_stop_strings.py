"""Stop strings in a text that comes in pieces, and control tokens among them."""

import itertools

import pytest
import tokenizer_fixtures

from jaxlm.inference.continuation import ContinuationText
from jaxlm.inference.requests import Request
from jaxlm.inference.stop_strings import StopScanner, stops_that_are_tokens


def before_stop(text, stops):
    """A text up to the one of these strings in it that ends first; all of it where there is none."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop and stop in text]
    return text[: min(found)[1] if found else len(text)]


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
        ("wxyz", ["wxyz", "xy"], "w"),  # the one that ends first, as where each letter is a piece
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


@pytest.mark.parametrize(
    ("stops", "expected"),
    [(["bc"], "abcde_a"), (["cd", "bc"], "ab"), (["abcd"], ""), (["ab"], "abcde_"), (["e"], "abcd")],
)
def test_no_stop_ends_in_what_comes_too_early(stops, expected):
    """It may begin there, though a shorter one lies within its beginning."""
    scanner = StopScanner(stops)
    written = scanner.add("abc", is_early=True)
    for letter in "de_abc":
        if not scanner.found:
            written += scanner.add(letter)
    assert written == expected and scanner.found


@pytest.mark.parametrize(
    ("stops", "expected", "ended"),
    [
        (["<|im_start|>"], "one", "one<|im_start|>"),
        (["e<|im_start|>"], "on", "one<|im_start|>"),
        (["<|im_start|>two"], "one", "one<|im_start|>two"),
        (["<|im_end|>", "o<|note|>"], "onetw", "onetwo<|note|>"),
        (["<|note|><|note|>", "wx"], "onetwo", None),
        (["ne<|note|>"], "onetwo", None),
        (["two"], "one", "onetwo"),
    ],
)
def test_a_stop_may_hold_names_of_control_tokens(stops, expected, ended):
    """They are no part of the text, but of a stop that is asked for; spelled out in letters they are text."""
    tokenizer = tokenizer_fixtures.chatml()
    controls = tokenizer.controls

    def shown(tokens, **options):
        text = ContinuationText(tokenizer, Request([65], 99, **options))
        written = "".join(text.add(token) for token in tokens if not text.stopped) + text.rest()
        return written, text.stopped

    tokens = [*tokenizer.encode("one"), controls["<|im_start|>"], *tokenizer.encode("two"), controls["<|note|>"]]
    assert shown(tokens, stop=stops) == (expected, ended is not None)
    assert shown(tokens, stop=stops, includes_stop=True)[0] == (expected if ended is None else ended)
    assert shown(tokenizer.encode("a <|note|> of it"), stop=["<|note|>"]) == ("a ", True)
    assert stops_that_are_tokens(["<|note|>", "x", "<|im_end|>x"], controls) == {controls["<|note|>"]}
