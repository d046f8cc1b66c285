"""The cost model compared with published figures: closed forms, worked exercises and measured runs.

A file of cases gives each figure with its whole configuration and its source. A closed form must agree within its
tolerance; a measured time must lie inside its counted bracket. Cases that do neither, and cases that cannot be
expressed, stay in the table with their reason.
"""

import statistics
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError, model_validator

from jaxlm.core import bundled
from jaxlm.core.errors import InputError
from jaxlm.core.schema import Section, merged
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.published.figures import FIGURES, CaseSetting, Range
from jaxlm.costs.workload import Workload
from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import Dtype, ExecutionConfig, Kernels, Remat
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Kind
from jaxlm.training.config import AnyOptimizer

PUBLISHED = Path(__file__).with_name("cases.toml")
_OPTIMIZER = TypeAdapter(AnyOptimizer)

Of = Literal[
    "parameters", "kv cache", "flops", "mfu", "memory", "measured memory", "roofline", "collectives", "duration",
    "training", "prefill", "decode", "scaling laws",
]  # fmt: skip


class CaseStepConfig(Section):
    """The workload of a case without its model."""

    kind: Kind = "train"
    batch: PositiveInt = 1
    sequence: PositiveInt = 1
    dtype: Dtype = "bfloat16"
    remat: Remat = "none"
    microbatches: PositiveInt = 1
    optimizer: str = "adamw"
    kernels: Kernels = "xla"
    mesh: dict[str, PositiveInt] = Field(default_factory=dict)


class PublishedCase(Section):
    """A published figure.

    `figure` names one of `figures.FIGURES`, which is called with `given`; `scale` multiplies its result. `model` is one
    of the file's [models] or of jaxlm's configurations. `chips` is a target, and `chip` overrides figures of its chip.
    `tolerance` is relative, and `because` gives its reason. `nearest` names the nearest expressible configuration if
    the exact one cannot be written. `why` explains a miss. A case with `not_expressed` is beyond the cost model.
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
    tolerance: float = Field(0.0, ge=0.0)
    because: str = ""
    nearest: str = ""
    why: str = ""
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
        return self.counted.middle if isinstance(self.counted, Range) else self.counted

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
        return (min(self.counted), max(self.counted)) if self.measured else None

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
            fast, _, slow = (abs(self.case.published - bound) for bound in self.counted)
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
            "published": case.published,
            "predicted": self.predicted,
            "bracket": self.bracket,
            "error": self.error,
            "off": self.off,
            "verdict": self.verdict,
            **{
                name: getattr(case, name)
                for name in ("because", "nearest", "why", "not_expressed")
                if getattr(case, name)
            },
            "source": case.source,
            "checked": case.checked,
        }


def check(path: Path = PUBLISHED) -> list[CountedCase]:
    """Count every case of a file. Raises InputError if the file is missing or is not a file of cases."""
    cases, models = read(path)
    return [CountedCase(case, _count(case, models)) for case in cases]


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
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        return [PublishedCase.model_validate(case) for case in values["case"]], values.get("models", {})
    except FileNotFoundError:
        raise InputError(f"there is no file {path} of published figures") from None
    except (OSError, ValueError, KeyError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else repr(error)
        raise InputError(f"{path} is no file of published figures: {said}") from None


def _count(case: PublishedCase, models: dict[str, Any]) -> float | Range | None:
    if case.not_expressed:
        return None
    if case.figure not in FIGURES:
        raise InputError(f"{case.id}: there is no figure {case.figure!r}; there are {', '.join(FIGURES)}")
    counted = FIGURES[case.figure](CaseSetting(_work(case, models), _target(case)), **case.given)
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
        ExecutionConfig(dtype=step.dtype, kernels=step.kernels, remat=step.remat),
        Layout(step.mesh),
        optimizer=_OPTIMIZER.validate_python(optimizer),
        microbatches=step.microbatches,
    )


def _target(case: PublishedCase) -> Target | None:
    if case.chips is None:
        return None
    target = Target.parse(case.chips)
    chip = Chip.model_validate(merged(target.chip.model_dump(), case.chip))
    return Target(chip, target.topology)


def _model(name: str, models: dict[str, Any]) -> dict[str, Any]:
    if name not in models:
        path = bundled.configurations().get(name)
        if path is None:
            raise InputError(f"{name!r} is neither one of the file's [models] nor one of jaxlm's configurations")
        return tomllib.loads(path.read_text(encoding="utf-8"))["model"]
    changes = dict(models[name])
    base = changes.pop("base", None)
    return merged(_model(base, models), changes) if base else changes
