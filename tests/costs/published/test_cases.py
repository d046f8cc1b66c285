"""The cost model against published figures: the file gives a reason for every miss."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from jaxlm.cli import main
from jaxlm.core.errors import InputError
from jaxlm.costs.published.cases import PUBLISHED, check, inside_bracket, median_errors, read

ROWS = check()
EXPRESSED = [row for row in ROWS if row.counted is not None]
CLOSED = [row for row in EXPRESSED if not row.measured]
MEASURED = [row for row in EXPRESSED if row.measured]
ids = lambda row: row.case.id  # noqa: E731


def test_every_case_is_named_once():
    names = [row.case.id for row in ROWS]
    assert len(names) == len(set(names)) >= 130


@pytest.mark.parametrize("row", CLOSED, ids=ids)
def test_a_closed_form_holds_or_says_why_not(row):
    assert not row.off or row.case.why
    assert row.case.tolerance <= 0.04


@pytest.mark.parametrize("kind", ["parameters", "kv cache", "flops", "mfu", "roofline", "duration"])
def test_closed_forms_of_the_whole_model_have_no_excuses(kind):
    assert all(not row.off for row in CLOSED if row.case.of == kind)


@pytest.mark.parametrize("row", MEASURED, ids=ids)
def test_a_measured_run_is_inside_its_bracket_or_says_why_not(row):
    assert row.verdict == "inside" or row.case.why


def test_nothing_was_measured_faster_than_the_lower_bound():
    assert inside_bracket(ROWS)["faster"] == 0


def test_most_training_runs_are_inside():
    training = [row for row in MEASURED if row.case.of == "training"]
    assert sum(row.verdict == "inside" for row in training) >= 0.75 * len(training)
    assert median_errors(training)["training"] < 0.35


def test_every_source_is_an_address_or_a_closed_form():
    sources = r"https://\S+.*|github:[\w.-]+/[\w.-]+(@\S+)?:\S+.*|arXiv:\d{4}\.\d{5}.*|closed form: .+"
    assert not [row.case.id for row in ROWS if not re.fullmatch(sources, row.case.source)]


def test_what_is_exact_was_given_no_reason_to_miss():
    """A reason that is no longer needed is removed from the file; a miss from a rated peak may come and go."""
    assert not [row.case.id for row in CLOSED if row.case.why and not row.off and "slip" not in row.case.why]


def test_every_model_of_the_file_is_used():
    models = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["models"]
    used = {row.case.model for row in ROWS} | {model.get("base") for model in models.values()}
    assert set(models) <= used


def test_the_command_as_json(capsys):
    assert main(["plan", "--check", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["rows"]) == len(ROWS) and printed["inside_bracket"] == inside_bracket(ROWS)
    assert printed["median_error"] == pytest.approx(median_errors(ROWS))
    for row in printed["rows"]:
        assert row["verdict"] in ("exact", "within", "misses", "inside", "faster", "slower", "not expressed")
        assert row["source"] and (row["predicted"] is None) == (row["verdict"] == "not expressed")
        if row["bracket"]:
            low, high = row["bracket"]
            assert low < row["predicted"] < high


def test_the_command_as_a_table(capsys):
    assert main(["plan", "--check"]) == 0
    printed = capsys.readouterr().out
    assert all(row.case.id in printed for row in ROWS)
    assert f"{inside_bracket(ROWS)['inside']} of {len(MEASURED)} measured figures lie inside" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "--check", "x.toml"], "leave out CONFIG"),
        (["plan", "--check", "x.toml", "--on", "h200-sxm"], "leave out CONFIG, --on"),
        (["plan", "--check", "--workload", "decode"], "leave out --workload"),
        (["plan"], "required: CONFIG, --on"),
        (["plan", "--on", "h200-sxm"], "required: CONFIG (see"),
        (["plan", "x.toml"], "required: --on (see"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, says, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and says in printed.err


def test_a_file_that_is_not_there_or_not_one_of_cases(tmp_path):
    with pytest.raises(InputError, match="there is no file .* of published figures"):
        read(tmp_path / "none.toml")
    case = 'id = "a"\nof = "flops"\nquantity = "a"\nunit = "a"\nsource = "a"\nchecked = "read"\n'
    wrong = {
        "": "case",
        "[[case]]\nid = 'a'": "of: Field required",
        f"[[case]]\n{case}": "needs figure or not_expressed",
        f"[[case]]\n{case}figure = 'mfu'": "one number is published",
        f"[[case]]\n{case}figure = 'mfu'\npublished = 1.0\ntolerance = 0.1": "because is missing",
    }
    for text, says in wrong.items():
        (tmp_path / "cases.toml").write_text(text)
        with pytest.raises(InputError, match=says):
            read(tmp_path / "cases.toml")
    for change, says in (
        ("figure = 'mfx'", "no figure 'mfx'"),
        ("figure = 'parameters'\nmodel = 'gpt9'", "'gpt9' is nei"),
    ):
        (tmp_path / "cases.toml").write_text(f"[[case]]\n{case}{change}\npublished = 1.0")
        with pytest.raises(InputError, match=says):
            check(tmp_path / "cases.toml")


def test_the_page_has_the_table_that_is_counted():
    """A change of any figure shows in docs/ladder.md, also if its miss has a reason."""
    page = (Path(__file__).parents[3] / "docs" / "ladder.md").read_text()
    for kind, median in median_errors(ROWS).items():
        counted = [row for row in EXPRESSED if row.case.of == kind]
        assert f"| {kind} | {len(counted)} | {sum(not row.off for row in counted)} | {median:.1%} |" in page
    inside = inside_bracket(ROWS)
    said = f"{inside['inside']} of {inside['all']} do, none is faster, and {inside['slower']} are slower"
    assert said in " ".join(page.split()) and not inside["faster"]
    measured = [row.row() for row in EXPRESSED if row.case.of == "decode"]
    # The bound is the larger end of a rate, and the smaller end of a time.
    shares = [
        row["published"] / max(row["bracket"]) if row["unit"] == "tok/s" else min(row["bracket"]) / row["published"]
        for row in measured
    ]
    said = f"decoding ran at {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the lower bound's rate"
    assert len(shares) == 8 and said in " ".join(page.split())
