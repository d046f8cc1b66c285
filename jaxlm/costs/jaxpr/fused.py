"""The bytes that a jaxpr moves where a compiler fuses, as XLA does, what is computed number by number.

A value is stored if it is a result of the whole, what a product reads or makes, or a sum, as a product with a vector is
too: XLA for GPUs and TPUs writes it as multiplications and a sum. All else is computed in the kernels that need it, as
often as they do. So each stored value is made by a kernel that reads the stored values that it
depends on, each once; of what is only sliced or gathered, the part.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.extend.core.primitives import dot_general_p, scan_p

from jaxlm.costs.jaxpr.cost import Phase
from jaxlm.costs.jaxpr.count import phase_of
from jaxlm.costs.jaxpr.primitives import KNOWN, equation_cost

_PARTS = {"slice", "dynamic_slice", "gather"}
_WHOLE = {"sort", "top_k", "approx_top_k"}


class _JaxprValue(NamedTuple):
    """A value of a jaxpr, or of one that it calls; `bytes` of it."""

    index: int
    bytes: int


class _FlatEquation(NamedTuple):
    """An equation between values. `moved`: the bytes that its kernels move inside it, if it is no single one."""

    eqn: JaxprEqn
    phase: Phase
    operands: tuple[_JaxprValue, ...]
    results: tuple[_JaxprValue, ...]
    moved: "Counter[Phase] | None" = None

    @property
    def is_view(self) -> bool:
        """True if its result is its operand under another name, or in another order, which products read as well."""
        is_same = len(self.operands) == len(self.results) == 1 and self.operands[0].bytes == self.results[0].bytes
        return is_same and (self.name == "transpose" or equation_cost(self.eqn)[2:4] == (0, 0))

    @property
    def is_alone(self) -> bool:
        """True if its operands and results go through memory."""
        is_whole = self.name in _WHOLE or _kind(self.eqn) in ("matmul", "kernel", "collective")
        return self.moved is not None or (is_whole and not self.is_of_vector)

    @property
    def is_sum(self) -> bool:
        """True if it adds many numbers for one of its result, which is stored."""
        return _kind(self.eqn) == "reduction" or self.is_of_vector

    @property
    def is_of_vector(self) -> bool:
        """True of products one of whose operands has batch and contracted axes alone."""
        if self.eqn.primitive is not dot_general_p:
            return False
        sides = zip(*self.eqn.params["dimension_numbers"], strict=True)
        return any(
            x.aval.ndim == len(contracted) + len(batched)
            for x, (contracted, batched) in zip(self.eqn.invars, sides, strict=True)
        )

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


def fused_bytes(jaxpr: Jaxpr, phase: Phase = "forward") -> Counter[Phase]:
    """Return the bytes by phase. `phase`: that of the whole, which its parts may leave. Raises ValueError for branches
    and for loops of unknown length."""
    program = _FlatEquations()
    operands = [program.value(x) for x in (*jaxpr.constvars, *jaxpr.invars)]
    results = program.add(jaxpr, operands, phase)
    steps = program.steps
    stored = {x.index for x in results}
    for step in reversed(steps):
        if step.is_alone or (step.is_view and step.results[0].index in stored):
            stored.update(x.index for x in step.operands)
    reads: dict[int, Counter[int]] = {x.index: Counter({x.index: x.bytes}) for x in operands}
    moved: Counter[Phase] = Counter()
    sizes = {x.index: x.bytes for x in (*operands, *(x for step in steps for x in step.results))}
    for step in steps:
        if step.is_view:
            reads[step.results[0].index] = reads[step.operands[0].index]
            continue
        if step.moved is not None:
            moved += step.moved
        elif step.is_alone:
            moved[step.phase] += sum(x.bytes for x in {*step.operands, *step.results})
        needed = _needed(step, reads, sizes)
        for x in step.results:
            is_stored = x.index in stored or step.is_alone or step.is_sum
            if is_stored and not step.is_alone:
                moved[step.phase] += x.bytes + sum(needed.values())
            reads[x.index] = Counter({x.index: x.bytes}) if is_stored else needed
    return moved


def _needed(step: _FlatEquation, reads: dict[int, Counter[int]], sizes: dict[int, int]) -> Counter[int]:
    """Return the bytes of each stored value that a kernel of a step's results reads."""
    needed: Counter[int] = Counter()
    most = step.results[0].bytes if step.name in _PARTS else None
    for i, operand in enumerate(step.operands):
        for index, read in reads[operand.index].items():
            read = read if most is None or i > 0 else min(read, most)
            needed[index] = min(needed[index] + read, sizes[index])
    return needed


def _kind(eqn: JaxprEqn) -> str:
    return equation_cost(eqn).kind


class _FlatEquations:
    """The equations of a jaxpr with those of the jaxprs that it calls in their place."""

    def __init__(self) -> None:
        self.steps: list[_FlatEquation] = []
        self._count = 0

    def value(self, variable: Any) -> _JaxprValue:
        """Return a new value of a variable's size."""
        self._count += 1
        aval = variable.aval
        return _JaxprValue(self._count, aval.size * aval.dtype.itemsize if hasattr(aval, "dtype") else 0)

    def add(self, jaxpr: Jaxpr, operands: Sequence[_JaxprValue | None], phase: Phase) -> list[_JaxprValue]:
        """Add the equations of a jaxpr of operands, None for constants, and return its results."""
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        given = [*[None] * (len(inputs) - len(operands)), *operands]
        values: dict[Any, _JaxprValue | None] = dict(zip(inputs, given, strict=True))

        def value_of(variable: Any) -> _JaxprValue | None:
            return None if isinstance(variable, Literal) else values[variable]

        for eqn in jaxpr.eqns:
            here, name = phase_of(eqn, phase), eqn.primitive.name
            inner = [] if name in KNOWN else list(jaxprs_in_params(eqn.params))
            operands_of_eqn = [value_of(x) for x in eqn.invars]
            is_scan = eqn.primitive is scan_p
            if inner and not is_scan and (len(inner) > 1 or len(inner[0].invars) != len(operands_of_eqn)):
                raise ValueError(f"{name} moves bytes that depend on what it is given")
            if inner and not is_scan:
                results = self.add(inner[0], operands_of_eqn, here)
            else:
                results = [self.value(x) for x in eqn.outvars]
                moved = _of_trips(eqn, inner[0], here) if is_scan else None
                self.steps.append(
                    _FlatEquation(eqn, here, tuple(x for x in operands_of_eqn if x), tuple(results), moved)
                )
            values.update(zip(eqn.outvars, results, strict=True))
        return [x for x in map(value_of, jaxpr.outvars) if x is not None]


def _of_trips(eqn: JaxprEqn, body: Jaxpr, phase: Phase) -> Counter[Phase]:
    return Counter({each: eqn.params["length"] * size for each, size in fused_bytes(body, phase).items()})
