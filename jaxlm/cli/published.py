"""Published figures next to the cost model's, for `jaxlm plan --check`."""

import json
from typing import TYPE_CHECKING

from jaxlm.cli.tables import TextTable, names, numbers, texts

if TYPE_CHECKING:
    from jaxlm.costs.published.cases import CountedCase


def show(as_json: bool) -> None:
    """Count every published figure and print the table, or one JSON object."""
    from jaxlm.costs.published.cases import check, inside_bracket, median_errors

    rows = check()
    medians, inside = median_errors(rows), inside_bracket(rows)
    if as_json:
        print(json.dumps({"rows": [row.row() for row in rows], "median_error": medians, "inside_bracket": inside}))
        return
    _table(rows).print()
    print()
    _summary(rows, medians).print()
    print()
    print(
        f"{inside['inside']} of {inside['all']} measured figures lie inside the bracket, {inside['faster']} are faster "
        f"and {inside['slower']} slower; {sum(row.counted is None for row in rows)} cases are beyond the cost model."
    )


def _table(rows: list["CountedCase"]) -> TextTable:
    counted = [*numbers("predicted", "bracket", "published"), *names("unit"), *numbers("error"), *names("verdict")]
    table = TextTable([*names("case"), *counted, *texts("why; or what stands for what is not exact")])
    for row in rows:
        case = row.case
        published = case.published if isinstance(case.published, float) else None
        table.add(
            case.id,
            _number(row.predicted),
            " to ".join(map(_number, row.bracket)) if row.measured else "",
            _number(published),
            case.unit,
            "" if row.error is None else f"{row.error:+.1%}",
            row.verdict + (f" by {abs(row.off):.1%}" if row.off else ""),
            case.not_expressed or (case.why if row.off else case.nearest),
        )
    return table


def _summary(rows: list["CountedCase"], medians: dict[str, float]) -> TextTable:
    table = TextTable([*names("kind"), *numbers("cases", "within", "median error")])
    for kind, median in medians.items():
        counted = [row for row in rows if row.case.of == kind and row.counted is not None]
        table.add(kind, str(len(counted)), str(sum(not row.off for row in counted)), f"{median:.1%}")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
