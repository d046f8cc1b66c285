"""Samples of matrices of test cases."""

import pytest
from matrices import sampled


def marked(params):
    return {param.values: [mark.name for mark in param.marks] for param in params}


def test_cases_outside_the_sample_are_exhaustive():
    cases = [pytest.param("a", 1, id="first"), pytest.param("b", 2, marks=pytest.mark.slow), pytest.param("b", 3)]
    expected = {("a", 1): [], ("b", 2): ["slow"], ("b", 3): ["exhaustive"]}
    assert marked(sampled(cases, {"first", "b-2"})) == expected
    assert marked(sampled(cases, lambda letter, number: number < 3)) == expected
    assert marked(sampled(["x", "y"], {"x"})) == {("x",): [], ("y",): ["exhaustive"]}


def test_a_sample_of_unknown_cases_is_refused():
    with pytest.raises(ValueError, match=r"do not exist: \['z'\]"):
        sampled(["x", "y"], {"x", "z"})
    with pytest.raises(ValueError, match="the sample is empty"):
        sampled(["x", "y"], lambda value: False)
