"""Published figures next to the cost model's, for `jaxlm plan --check`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlm.cli.tables import TextTable, names, numbers, texts

if TYPE_CHECKING:
    from jaxlm.costs.published.accuracy import Accuracy
    from jaxlm.costs.published.cases import CountedCase


def show(path: Path | None, as_json: bool) -> None:
    """Count the published figures of a file, by default jaxlm's own, and print a summary, or one JSON object."""
    from jaxlm.costs.published.accuracy import by, is_judged, large_misses
    from jaxlm.costs.published.cases import check, inside_bracket, median_errors

    rows = check(path)
    judged = [row for row in rows if is_judged(row)]
    reported = [row for row in rows if row.measured and not is_judged(row)]
    kinds, chips = by(lambda row: row.case.of, judged), by(lambda row: f"{row.case.of}, {row.chip}", judged)
    others = by(lambda row: f"{row.case.of}, {row.case.reported}", reported)
    if as_json:
        accuracies = {"by_kind": kinds, "by_chip": chips, "reported": others}
        shown = {name: {key: each.row() for key, each in group.items()} for name, group in accuracies.items()}
        inside = inside_bracket(judged)
        printed = {"rows": [row.row() for row in rows], "median_error": median_errors(rows), "inside_bracket": inside}
        print(json.dumps({**printed, **shown}))
        return
    closed = [row for row in rows if row.counted is not None and not row.measured]
    if closed:
        _cases(closed).print()
        print()
        _closed_forms(closed).print()
        print()
    if judged:
        _accuracies("measured", kinds, chips).print()
        print()
    if reported:
        _accuracies("measured, no accuracy asked", others).print()
        print()
    if missed := large_misses(rows):
        _misses(missed).print()
        print()
    print(f"{len(rows) - len(closed) - len(judged) - len(reported)} cases are beyond the cost model (--json says why).")


def _cases(rows: Sequence["CountedCase"]) -> TextTable:
    table = TextTable(
        [
            *texts("case", least=20),
            *numbers("predicted", "published"),
            *names("unit"),
            *numbers("error"),
            *names("verdict"),
            *texts("why; or what stands for what is not exact", under="case"),
        ]
    )
    for row in rows:
        case = row.case
        table.add(
            case.id,
            _number(row.predicted),
            _number(case.published),
            case.unit,
            f"{row.error:+.1%}",
            row.verdict,
            f"by {abs(row.off):.1%}{': ' * bool(case.why)}{case.why}" if row.off else case.nearest,
        )
    return table


def _closed_forms(rows: Sequence["CountedCase"]) -> TextTable:
    from jaxlm.costs.published.cases import median_errors

    table = TextTable([*names("closed forms"), *numbers("cases", "within", "median error")])
    for kind, median in median_errors(rows).items():
        counted = [row for row in rows if row.case.of == kind]
        table.add(kind, str(len(counted)), str(sum(not row.off for row in counted)), f"{median:.1%}")
    return table


def _accuracies(title: str, *groups: dict[str, "Accuracy"]) -> TextTable:
    table = TextTable([*texts(title), *numbers("runs", "median", "p90", "inside", "width", "below bound")])
    for group in groups:
        for name, each in group.items():
            errors = f"{each.median:.1%}", f"{each.ninetieth:.0%}"
            table.add(name, str(each.count), *errors, f"{each.inside:.0%}", f"{each.width:.2f}", str(each.impossible))
    return table


def _misses(rows: Sequence["CountedCase"]) -> TextTable:
    table = TextTable([*texts("misses above 25 %"), *numbers("error"), *texts("why")])
    for row in rows:
        table.add(row.case.id, f"{row.error:+.0%}", row.case.why)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
