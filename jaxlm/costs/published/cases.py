"""The cost model compared with published figures: closed forms, worked exercises and measured runs.

A file of cases gives each figure with its whole configuration and its source; a file of runs gives measured steps,
which rules turn into workloads (`runs.py`). A closed form must agree within its tolerance; a measured time must lie
inside its counted bracket. Those that do neither, and those that cannot be expressed, keep their reason.
"""

import fnmatch
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError, model_validator

from jaxlm.core import bundled
from jaxlm.core.errors import InputError
from jaxlm.core.explain import first_line
from jaxlm.core.schema import Section, merged
from jaxlm.costs.deployment import serving_throughput
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.published import runs
from jaxlm.costs.published.figures import FIGURES, CaseSetting, Range, estimate
from jaxlm.costs.stack import stack_from
from jaxlm.costs.workload import Workload
from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import ContextParallel, Dtype, ExecutionConfig, Kernels, Remat
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Kind
from jaxlm.training.config import AnyOptimizer

PUBLISHED = Path(__file__).with_name("cases.toml")
_OPTIMIZER = TypeAdapter(AnyOptimizer)

Of = Literal[
    "parameters", "kv cache", "flops", "mfu", "memory", "measured memory", "roofline", "collectives", "duration",
    "pipeline", "training", "prefill", "decode", "serving", "scaling laws",
]  # fmt: skip


def _mesh_axis(axis: str) -> str:
    Layout({axis: 1})  # raises ValueError for an axis that no mesh has
    return axis


_MeshAxis = Annotated[str, AfterValidator(_mesh_axis)]


class CaseStepConfig(Section):
    """The workload of a case without its model. `whole_over`: mesh axes over which parameters are copied, as Megatron's
    context parallelism has them, in place of sharded."""

    kind: Kind = "train"
    batch: PositiveInt = 1
    sequence: PositiveInt = 1
    dtype: Dtype = "bfloat16"
    remat: Remat = "none"
    microbatches: PositiveInt = 1
    optimizer: str = "adamw"
    kernels: Kernels = "xla"
    scan_layers: bool = False
    context_parallel: ContextParallel = "auto"
    mesh: dict[_MeshAxis, PositiveInt] = Field(default_factory=dict)
    whole_over: tuple[_MeshAxis, ...] = ()


class PublishedCase(Section):
    """A published figure.

    `figure` names one of `figures.FIGURES`, which is called with `given`; `scale` multiplies its result. `model` is one
    of the file's [models] or of jaxlm's configurations. `chips` is a target, and `chip` overrides figures of its chip.
    `stack` is the software under which it ran: one of `STACKS` (`like`) with changes, or jaxlm's. `tolerance` is
    relative, and `because` gives its reason. `nearest` names the nearest expressible configuration if the exact one
    cannot be written. `why` explains a miss. `reported` says why no accuracy is asked of a measured figure. A case with
    `not_expressed` is beyond the cost model.
    """

    id: str
    of: Of
    quantity: str
    published: float | tuple[float, ...] | None = None
    unit: str
    source: str
    checked: Literal["read", "recomputed", "recalled"]
    figure: str | None = None
    given: dict[str, Any] = Field(default_factory=dict)
    scale: PositiveFloat = 1.0
    model: str | None = None
    step: CaseStepConfig = CaseStepConfig()
    chips: str | None = None
    chip: dict[str, Any] = Field(default_factory=dict)
    stack: dict[str, Any] = Field(default_factory=dict)
    tolerance: float = Field(0.0, ge=0.0)
    because: str = ""
    nearest: str = ""
    why: str = ""
    reported: str = ""
    not_expressed: str = ""

    @model_validator(mode="after")
    def _consistent(self):
        if bool(self.figure) == bool(self.not_expressed):
            raise ValueError(f"{self.id} needs figure or not_expressed, and not both")
        if self.figure and not isinstance(self.published, float):
            raise ValueError(f"{self.id}: exactly one number is published of a counted case")
        if self.tolerance and not self.because:
            raise ValueError(f"{self.id} has a tolerance and no reason for it: because is missing")
        return self


@dataclass(frozen=True)
class CountedCase:
    """A case with its counted figure."""

    case: PublishedCase
    counted: float | Range | None

    @property
    def predicted(self) -> float | None:
        return self.counted.expected if isinstance(self.counted, Range) else self.counted

    @property
    def error(self) -> float | None:
        """The error of the prediction, relative to the published figure."""
        return None if self.counted is None else self.predicted / self.case.published - 1.0

    @property
    def measured(self) -> bool:
        """True if the published figure was measured, so that it is compared with a bracket."""
        return isinstance(self.counted, Range)

    @property
    def bracket(self) -> tuple[float, float] | None:
        """The bounds that a measured figure must lie between."""
        if not self.measured:
            return None
        return min(self.counted.fast, self.counted.slow), max(self.counted.fast, self.counted.slow)

    @property
    def impossible(self) -> bool:
        """True if a measured figure is faster than the lower bound of time."""
        if not self.measured:
            return False
        is_rate = self.counted.bound > self.counted.expected
        return self.case.published > self.counted.bound if is_rate else self.case.published < self.counted.bound

    @property
    def chip(self) -> str:
        """The kind of chip that the case names; none for a case of a model alone."""
        return (self.case.chips or "").partition(":")[0]

    @property
    def off(self) -> float:
        """The distance by which the case misses, relative to the published figure; 0.0 if it holds."""
        if self.counted is None:
            return 0.0
        if not self.measured:
            return self.error if abs(self.error) > self.case.tolerance + 1e-12 else 0.0
        low, high = self.bracket
        nearest = min(max(self.case.published, low), high)
        return nearest / self.case.published - 1.0

    @property
    def verdict(self) -> str:
        if self.counted is None:
            return "not expressed"
        if self.measured:
            if not self.off:
                return "inside"
            fast, slow = (abs(self.case.published - end) for end in (self.counted.fast, self.counted.slow))
            return "faster" if fast < slow else "slower"
        if self.off:
            return "misses"
        return "exact" if abs(self.error) < 1e-12 else "within"

    def row(self) -> dict[str, Any]:
        """Return the case as a JSON object."""
        case = self.case
        return {
            "id": case.id,
            "kind": case.of,
            "quantity": case.quantity,
            "unit": case.unit,
            "chip": self.chip,
            "published": case.published,
            "predicted": self.predicted,
            "bracket": self.bracket,
            "error": self.error,
            "off": self.off,
            "verdict": self.verdict,
            **{
                name: getattr(case, name)
                for name in ("because", "nearest", "why", "reported", "not_expressed")
                if getattr(case, name)
            },
            "source": case.source,
            "checked": case.checked,
        }


class Miss(Section):
    """The explanation of misses of measured runs. `run` is the id of one, or a pattern of "group|model|chip"."""

    run: str
    why: str

    def explains(self, run: runs.MeasuredRun) -> bool:
        """Return whether the explanation is of this run."""
        return run.id == self.run or fnmatch.fnmatchcase(run.family, self.run)


def check(path: Path | None = None) -> list[CountedCase]:
    """Count every case of a TOML file, or every run of a JSON file; without one, all that come with jaxlm. Raises
    InputError if the file is missing or is not a file of cases or of runs."""
    if path is None:
        return check(PUBLISHED) + check(runs.RUNS)
    if path.suffix == ".json":
        return check_runs(runs.read_runs(path))
    cases, models = read(path)
    return [CountedCase(case, _count(case, models)) for case in cases]


def check_runs(measured: Iterable[runs.MeasuredRun]) -> list[CountedCase]:
    """Count measured runs."""
    explanations = misses()
    return [_count_run(run, explanations) for run in measured]


def _count_run(run: runs.MeasuredRun, explanations: Iterable[Miss]) -> CountedCase:
    rule = runs.rule_of(run)
    of = {"train": "training", "decode": "decode", "serve": "serving"}[run.kind]
    values = {
        "id": run.id,
        "of": of,
        "quantity": "output token" if run.kind == "serve" else "step",
        "unit": "s",
        "source": run.source,
        "checked": run.verified,
        "chips": f"{run.chip}:{run.chips}",
        "nearest": rule.nearest,
        "why": "; ".join(each.why for each in explanations if each.explains(run)),
        "reported": ", ".join(filter(None, ("a mixture of experts" if run.is_mixture else "", rule.reported))),
    }
    try:
        expressed = runs.express(run, rule)
        counted = _estimate_run(expressed)
    except (runs.NotExpressed, InputError) as error:
        return CountedCase(PublishedCase(**values, not_expressed=str(error)), None)
    return CountedCase(PublishedCase(**values, figure="step_seconds", published=expressed.seconds), counted)


def _estimate_run(expressed: runs.ExpressedRun) -> Range:
    if served := expressed.served:
        rate = serving_throughput(expressed.work, expressed.target, *served, expressed.stack)
        return Range(1 / rate.bound, 1 / rate.high, 1 / rate.expected, 1 / rate.low)
    counted = estimate(expressed.work, expressed.target, expressed.stack)
    if expressed.recomputed is None:
        return counted
    again = runs.recomputing(expressed)
    share = expressed.recomputed
    whole = estimate(again.work, again.target, again.stack)
    return Range(*((1 - share) * none + share * full for none, full in zip(counted, whole, strict=True)))


def misses() -> list[Miss]:
    """Return the explanations of misses of measured runs."""
    return [Miss.model_validate(miss) for miss in _values(PUBLISHED).get("miss", [])]


def median_errors(rows: Iterable[CountedCase]) -> dict[str, float]:
    """Return the median absolute error of each kind of case that is expressed."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.counted is not None:
            errors.setdefault(row.case.of, []).append(abs(row.error))
    return {kind: statistics.median(each) for kind, each in errors.items()}


def inside_bracket(rows: Iterable[CountedCase]) -> dict[str, int]:
    """Count the measured figures inside their bracket, and those faster or slower than all of it."""
    verdicts = [row.verdict for row in rows if row.measured]
    return {**{verdict: verdicts.count(verdict) for verdict in ("inside", "faster", "slower")}, "all": len(verdicts)}


def read(path: Path = PUBLISHED) -> tuple[list[PublishedCase], dict[str, Any]]:
    """Return the cases of a file and the models that it defines. Raises InputError."""
    values = _values(path)
    try:
        return [PublishedCase.model_validate(case) for case in values["case"]], values.get("models", {})
    except (ValueError, KeyError) as error:
        said = first_line(error) if isinstance(error, ValidationError) else repr(error)
        raise InputError(f"{path} is no file of published figures: {said}") from None


def _values(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no file {path} of published figures") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no file of published figures: {error!r}") from None


def _count(case: PublishedCase, models: dict[str, Any]) -> float | Range | None:
    if case.not_expressed:
        return None
    if case.figure not in FIGURES:
        raise InputError(f"{case.id}: there is no figure {case.figure!r}; there are {', '.join(FIGURES)}")
    setting = CaseSetting(_work(case, models), _target(case), stack_from(case.stack))
    counted = FIGURES[case.figure](setting, **case.given)
    if isinstance(counted, Range):
        return Range(*(value * case.scale for value in counted))
    return counted * case.scale


def _work(case: PublishedCase, models: dict[str, Any]) -> Workload | None:
    if case.model is None:
        return None
    step, model = case.step, ModelConfig.model_validate(_model(case.model, models))
    optimizer = {"kind": step.optimizer, "schedule": {"kind": "constant"}}
    return Workload(
        step.kind,
        model,
        step.batch,
        step.sequence,
        ExecutionConfig(
            dtype=step.dtype,
            kernels=step.kernels,
            remat=step.remat,
            scan_layers=step.scan_layers,
            context_parallel=step.context_parallel,
        ),
        Layout(step.mesh),
        own_rules=runs.rules_with_whole(step.kind, step.whole_over),
        optimizer=_OPTIMIZER.validate_python(optimizer),
        microbatches=step.microbatches,
    )


def _target(case: PublishedCase) -> Target | None:
    if case.chips is None:
        return None
    return Target.parse(case.chips, case.chip)


def _model(name: str, models: dict[str, Any]) -> dict[str, Any]:
    if name not in models:
        path = bundled.configurations().get(name)
        if path is None:
            raise InputError(f"{name!r} is neither one of the file's [models] nor one of jaxlm's configurations")
        return tomllib.loads(path.read_text(encoding="utf-8"))["model"]
    changes = dict(models[name])
    base = changes.pop("base", None)
    return merged(_model(base, models), changes) if base else changes
