"""The cost model against published figures: the file gives a reason for every miss."""

import itertools
import json
import re
import tomllib
from pathlib import Path

import pytest

from jaxlm import config
from jaxlm.cli import main
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.published.accuracy import by, is_judged, large_misses
from jaxlm.costs.published.cases import PUBLISHED, check, read
from jaxlm.costs.workload import Workload

pytestmark = pytest.mark.xdist_group("published")  # with test_measured_runs.py: counted once


@pytest.fixture(scope="module")
def rows(cases):
    return cases


@pytest.fixture(scope="module")
def expressed(rows):
    return [row for row in rows if row.counted is not None]


@pytest.fixture(scope="module")
def closed(expressed):
    return [row for row in expressed if not row.measured]


@pytest.fixture(scope="module")
def measured(expressed):
    return [row for row in expressed if row.measured]


def test_every_case_is_named_once(rows):
    names = [row.case.id for row in rows]
    assert len(names) == len(set(names)) >= 130


def test_a_closed_form_holds_or_says_why_not(closed):
    assert closed and not {row.case.id: row.off for row in closed if row.off and not row.case.why}
    assert not [row.case.id for row in closed if row.case.tolerance > 0.04]


@pytest.mark.parametrize("kind", ["parameters", "kv cache", "flops", "mfu", "roofline", "duration"])
def test_closed_forms_of_the_whole_model_have_no_excuses(kind, closed):
    assert all(not row.off for row in closed if row.case.of == kind)


def test_large_misses_and_no_others_say_why(rows, measured):
    assert {row.case.id for row in measured if row.case.why} == {row.case.id for row in large_misses(rows)}


def test_nothing_was_measured_faster_than_the_lower_bound(measured):
    assert not [row.case.id for row in measured if is_judged(row) and row.impossible]


def test_most_measured_cases_are_near_and_inside(measured):
    kinds = by(lambda row: row.case.of, [row for row in measured if is_judged(row)])
    assert kinds["training"].median < 0.12 and kinds["training"].inside >= 0.8
    assert kinds["decode"].median < 0.20


def test_pipelines_and_context_are_counted_as_they_ran(rows):
    by_id = {row.case.id: row for row in rows}
    assert by_id["llama3.1-405b-h100-512-interleaving"].predicted == pytest.approx(1.304, abs=2e-3)
    assert by_id["mfu-maxtext-10t"].verdict == "inside"
    long = by_id["mfu-llama31-405b-16384-131072"]
    assert long.bracket[0] * 0.71 < long.case.published < long.bracket[1]  # 0.71: without scores that the mask hides


def test_the_page_has_the_figures_of_single_runs(rows):
    page = " ".join((Path(__file__).parents[3] / "docs" / "ladder.md").read_text().split())
    by_id = {row.case.id: row for row in rows}
    interleaved, long, short, mixture, deepseek, hours = (
        by_id[each]
        for each in (
            "llama3.1-405b-h100-512-interleaving",
            "mfu-llama31-405b-16384-131072",
            "mfu-llama31-405b-16384-8192",
            "mfu-maxtext-10t",
            "mfu-deepseek-v3",
            "gpuh-deepseek-v3",
        )
    )
    counted = flops(Workload("train", config.load("llama3.1-405b").model, 128, 131_072))
    least, most = (each / 1e6 for each in hours.bracket)
    for said in (
        f"{interleaved.case.published} times as fast with interleaved stages: the count is {interleaved.predicted:.2f}",
        f"counted at {long.predicted:.0f} with all scores of attention and at "
        f"{long.predicted * counted.model_causal / counted.model:.0f} without those that the mask hides",
        f"it is {short.case.published:.0f} and counted at {short.predicted:.0f}",
        f"published at {mixture.case.published} % MFU and counted at {mixture.predicted:.1f} %",
        f"agree to {abs(deepseek.error):.1%}".replace("%", " %"),
        f"{hours.case.published / 1e6:.3f} M H800 hours",
        f"counted as {hours.predicted / 1e6:.2f} M, in a bracket from {least:.2f} to {most:.2f} M",
    ):
        assert said in page


def test_every_source_is_an_address_or_a_closed_form(rows):
    sources = r"https://\S+.*|github:[\w.-]+/[\w.-]+(@\S+)?:\S+.*|arXiv:\d{4}\.\d{5}.*|closed form: .+"
    assert not [row.case.id for row in rows if not re.fullmatch(sources, row.case.source)]


def test_what_is_exact_was_given_no_reason_to_miss(closed):
    """A reason that is no longer needed is removed from the file; a miss from a rated peak may come and go."""
    assert not [row.case.id for row in closed if row.case.why and not row.off and "slip" not in row.case.why]


def test_every_model_of_the_file_is_used(rows):
    models = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["models"]
    used = {row.case.model for row in rows} | {model.get("base") for model in models.values()}
    assert set(models) <= used


def test_the_command_as_json(capsys, rows, expressed, measured):
    assert main(["plan", "--check", str(PUBLISHED), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["rows"]) == len(rows) and set(printed["median_error"]) == {row.case.of for row in expressed}
    judged = sum(is_judged(row) for row in measured)
    assert sum(each["count"] for each in printed["by_kind"].values()) == judged == printed["inside_bracket"]["all"]
    for row in printed["rows"]:
        assert row["verdict"] in ("exact", "within", "misses", "inside", "faster", "slower", "not expressed")
        assert row["source"] and (row["predicted"] is None) == (row["verdict"] == "not expressed")
        if row["bracket"]:
            low, high = row["bracket"]
            assert low < row["predicted"] < high


def test_the_command_as_a_table(capsys, rows, closed):
    assert main(["plan", "--check", str(PUBLISHED)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    folded = {words[0] + after[0] for words, after in itertools.pairwise(lines) if words and len(after) == 1}
    named = {words[0] for words in lines if words} | folded
    assert named >= {row.case.id for row in [*closed, *large_misses(rows)]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "x.toml", "--check"], "leave out CONFIG"),
        (["plan", "x.toml", "--check", "--on", "h200-sxm"], "leave out CONFIG, --on"),
        (["plan", "--check", "x.toml"], "there is no file x.toml of published figures"),
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
        "[[case]]\nid = 'a'": "of: field required",
        f"[[case]]\n{case}": "needs figure or not_expressed",
        f"[[case]]\n{case}figure = 'mfu'": "one number is published",
        f"[[case]]\n{case}step.whole_over = ['cp']": r"step\.whole_over.*there is no mesh axis cp; the axes are",
        f"[[case]]\n{case}step.mesh.cp = 2": r"step\.mesh.*there is no mesh axis cp; the axes are",
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
