"""Widths of weights and drafts on the command line of `plan` and `compile`."""

import json
import re

import pytest

from jaxlm.cli import main

SERVE = ["--workload", "serve", "--prompt", "300", "--output", "100"]
AUTO = ["--quantize", "auto", "--speculate", "ngram:auto"]


def planned(capsys, *arguments, model="llama3.1-8b"):
    assert main(["plan", model, *arguments]) == 0
    return capsys.readouterr().out


def test_what_a_search_chose_of_an_engine_is_in_the_table(capsys):
    asked = ["--on", "l40s:1", *SERVE, *AUTO, "--tpot", "6ms", "inference.sequences=4"]
    row, said = json.loads(planned(capsys, *asked, "--json")), planned(capsys, *asked)
    assert row["quantize"] in ("int8", "w8a8", "int4") and row["speculation"]["drafts"] > 0
    assert re.search(rf"^ +1 × 1 +{row['batch']} {row['quantize']} +{row['speculation']['drafts']} ", said, re.M)
    assert "weights" in said.splitlines()[2] and max(map(len, said.splitlines())) <= 80
    flat = " ".join(said.split())
    how = f"jaxlm eval MODEL --quantize {row['quantize']} --data FILE"
    assert f"rounding changes what the model says: see {how}" in flat
    assert f"{row['speculation']['drafts']} of each sequence, right with probability 0.6:" in flat


def test_chips_are_compared_each_with_its_best_engine(capsys):
    """Each in one line; and what may be limited is said where nothing is."""
    assert main(["plan", "qwen3-0.6b", "--on", "all:1", *SERVE, *AUTO, "inference.sequences=8"]) == 0
    said, remarks = capsys.readouterr()
    assert max(map(len, said.splitlines())) <= 80
    rows = said.partition("─\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) > 15 and all(re.match(r"\S+:1 +1 × 1 +8 +\S+\+\d ", row) for row in rows)
    assert any("w8a8+" in row for row in rows)
    limits = "--ttft 0.5 limits the first token of nine of ten, --tpot 0.03 each later one"
    assert limits in " ".join(remarks.split())
    assert main(["plan", "qwen3-0.6b", "--on", "l4:1", *SERVE, "--tpot", "50ms"]) == 0
    assert "limits the first token" not in " ".join(capsys.readouterr().err.split())


def test_values_that_are_given_are_no_search(capsys):
    given = ["--on", "h100-sxm5:1", *SERVE, "--quantize", "fp8", "--speculate", "ngram:3", "inference.acceptance=0.9"]
    row, said = json.loads(planned(capsys, *given, "--json")), planned(capsys, *given)
    assert row["quantize"] == "fp8" and row["speculation"]["drafts"] == 3
    assert "weights" not in said.partition("best")[0] and "fp8; rounding" in said
    decode = json.loads(planned(capsys, "--on", "h100-sxm5:1", "--workload", "decode", *given[8:], "--json"))
    assert decode["speculation"] == row["speculation"]


@pytest.mark.parametrize(
    "command, arguments, said",
    [
        ("plan", ["--workload", "decode", "--quantize", "auto"], "--quantize auto is a search, of --workload serve"),
        ("plan", ["--workload", "decode", "--speculate", "ngram:auto"], "--speculate ngram:auto is a search"),
        ("compile", ["--workload", "decode", "--speculate", "ngram:auto"], "--speculate ngram:auto is a search"),
        ("plan", ["--workload", "prefill", "--speculate", "ngram"], "leave it out for --workload prefill"),
        ("plan", [*SERVE, "--speculate", "ngram", "inference.speculate=ngram:2"], "are one setting; give one of them"),
        ("compile", ["--cache-dtype", "int8"], "--cache-dtype is of inference; leave it out for --workload train"),
        ("plan", [*SERVE, "--cache-dtype", "int8", "inference.cache_dtype=fp8"], "are one setting; give one of them"),
    ],
)
def test_no_option_is_left_aside(capsys, command, arguments, said):
    assert main([command, "llama3.1-8b", "--on", "h100-sxm5:1", *arguments]) == 2
    out, errors = capsys.readouterr()
    assert out == "" and said in " ".join(errors.split()) and "Traceback" not in errors


def test_a_cache_of_eight_bits_is_named_and_counted(capsys):
    asked = ["--on", "h100-sxm5:1", "--workload", "decode", "inference.sequences=8", "inference.length=4096"]
    option, key = (
        json.loads(planned(capsys, *asked, *more, "--json"))
        for more in (["--cache-dtype", "int8"], ["inference.cache_dtype=int8"])
    )
    full = json.loads(planned(capsys, *asked, "--json"))
    assert option == key
    # Heads of 128 numbers of one byte and a scale of four, in place of two bytes for each.
    assert option["kv_bytes_per_token"] * 256 == full["kv_bytes_per_token"] * 132
    assert "in bfloat16, keys and values in int8" in " ".join(planned(capsys, *asked, "--cache-dtype", "int8").split())
