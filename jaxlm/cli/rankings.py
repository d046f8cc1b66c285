"""A table of several plans, the best first, for `jaxlm plan`."""

import itertools
import json
import shlex
from typing import TYPE_CHECKING, Any

from jaxlm.cli import chip_figures
from jaxlm.cli.tables import TextTable, names, numbers, print_sentence, texts
from jaxlm.core import units

if TYPE_CHECKING:
    from jaxlm.costs.plan import Plan
    from jaxlm.costs.stack import Stack

_SHOWN = 10  # of the plans that a search finds


def shown(plans: list["Plan"]) -> list["Plan"]:
    """Return the plans that a table shows: all of several chips, and the best meshes of one."""
    return plans[: _SHOWN if len({str(plan.target) for plan in plans}) == 1 else None]


def say_left_out(refused: dict[str, str]) -> str | None:
    """Return a line about the chips of the catalog that have no plan."""
    if not refused:
        return None
    targets, (first, *others) = ", ".join(refused), refused.values()
    if not others:
        return f"{targets} is left out: {first}"
    return f"{len(refused)} kinds of chips are left out ({targets}): {first}; --json says why of each"


def say_stack(stack: "Stack") -> str | None:
    """Return a line that says that plans are of other software than jaxlm's."""
    changes = ", ".join(f"{key}={value}" for key, value in stack.changes().items())
    return (
        f"counted under other software ({changes}): an estimate of what jaxlm does not run itself" if changes else None
    )


def show(plans: list["Plan"], refused: dict[str, str], best: dict[str, Any] | None, limited: bool) -> None:
    """Print plans as a table; with the row of the best as one JSON object.

    A table of one kind of chips has no columns of prices and energy per token, which go with the step there: a line
    gives those of the first row. So it fits a terminal of 80 columns; in one of several kinds mesh, microbatches and
    rematerialisation stand under the chips where they have to.

    Args:
      refused: the chips of the catalog without a plan, with why.
      best: the JSON row of the first plan; None prints the table.
      limited: whether the run has a budget or a deadline: the table then has the time and the price of the run, in
        place of the lower bound of the step and of tokens/s.
    """
    if best is not None:
        left_out = [{"target": target, "why": why} for target, why in refused.items()]
        print(json.dumps({**best, "rows": [plan.row() for plan in plans], "refused": left_out}))
        return
    trains = plans[0].work.kind == "train"
    several = len({str(plan.target) for plan in plans}) > 1 or bool(refused)
    settings = ("micro", "remat") if trains else ()
    run, of_step = (("run", "$/run"), ()) if limited else ((), ("at least", "tokens/s"))
    figures = numbers("memory", "step", *of_step, "MFU", *run, *("$/Mtok", "J/tok") * several)
    where = [] if several else [f"on {plans[0].target}"]
    mesh = [*texts("mesh", after="×", under="chips"), *names(*settings, under="chips")]
    table = TextTable([*names(*["chips"] * several), *mesh, *figures], _title(plans[0], *where))
    labels = _labels(shown(plans))
    for plan in shown(plans):
        cells = _cells(plan, labels, limited)
        table.add(*[str(plan.target)] * several, *cells, *_per_token(plan) * several)
    table.print()
    for remark in () if several else (_say_per_token(plans[0]), _say_tied(shown(plans))):
        if remark:
            print_sentence(remark)
    for name, remat in labels.items():
        print(f"{name}: execution.remat={shlex.quote(remat)}")
    if remark := _say_tight(shown(plans)):
        print_sentence(remark)


def _title(plan: "Plan", *where: str) -> str:
    """Return the step of a plan, `where` it runs, and the figures of the chip that are not the catalog's."""
    changes = chip_figures.changes(plan.target.chip)
    return " ".join([str(plan.work), *where, *[f"({changes})"] * bool(changes)])


def _labels(plans: list["Plan"]) -> dict[str, str]:
    """Return a short name for each list of activations that plans keep: its only name, or "named"."""
    listed = {plan.work.remat: plan.work.remat_shown for plan in plans if not isinstance(plan.work.remat, str)}
    labels: dict[str, str] = {}
    for kept, remat in listed.items():
        label = kept[0] if len(kept) == 1 else "named"
        labels[label if label not in labels else f"{label} {len(labels) + 1}"] = remat
    return labels


def _cells(plan: "Plan", labels: dict[str, str], limited: bool) -> list[str]:
    remat = {shown: label for label, shown in labels.items()}.get(plan.work.remat_shown, plan.work.remat)
    run = (
        units.or_dash(plan.run_s, units.seconds),
        units.or_dash(plan.usd_per_run, "{:,.0f}".format),
    )
    rounds = f", {plan.work.rounds} rounds" if plan.work.rounds > 1 else ""
    once = ", gathered once" if plan.work.gathers_once else ""
    return [
        str(plan.work.layout).replace(" × ", "×") + rounds + once,
        *((str(plan.work.microbatches), remat) if plan.work.kind == "train" else ()),
        f"{plan.memory.total / plan.capacity:.0%}{_TIGHT * (plan.fits and not plan.leaves_headroom)}",
        units.seconds(plan.time.expected),
        *(() if limited else (units.seconds(plan.time.lower_bound), f"{plan.tokens_per_s:,.0f}")),
        f"{plan.mfu:.0%}",
        *(run if limited else ()),
    ]


def _per_token(plan: "Plan") -> list[str]:
    return [units.or_dash(figure, "{:.3g}".format) for figure in (plan.usd_per_million_tokens, plan.joules_per_token)]


def _say_per_token(plan: "Plan") -> str | None:
    """Return a line about the price and the energy of a token in the first row; None if neither is published."""
    usd, joules = plan.usd_per_million_tokens, plan.joules_per_token
    parts = [] if usd is None else [f"${usd:.3g} per million tokens"]
    parts += [] if joules is None else [f"{joules:.3g} J per token"]
    return f"the first row takes {' and '.join(parts)}" if parts else None


def _say_tied(plans: list["Plan"]) -> str | None:
    """Return a line about plans that stand before slightly faster ones; None if there are none."""
    from jaxlm.costs.plan_order import TIE

    ratios = (plan.time.expected / later.time.expected for plan, later in itertools.pairwise(plans))
    if not any(1 < ratio <= 1 + TIE for ratio in ratios):
        return None
    return f"meshes within {TIE:.0%} are a tie, which no estimate decides: the simplest is first"


_TIGHT = "*"


def _say_tight(plans: list["Plan"]) -> str | None:
    """Return a line about plans that leave too little memory free; None if there are none."""
    from jaxlm.costs.plan import HEADROOM

    if all(plan.leaves_headroom or not plan.fits for plan in plans):
        return None
    return f"{_TIGHT} leaves less than {HEADROOM:.0%} of memory free, as much as the count may be wrong by"
