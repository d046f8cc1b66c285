"""FLOPs and bytes of any JAX function, counted from its jaxpr: no backend, no compiler, no arrays.

    cost = count(steps.train, jax.eval_shape(steps.init), batch)  # arrays or jax.ShapeDtypeStruct
    print(cost)
    cost["layers/attention/query"].matmul_flops
    cost.backward.flops, cost.rematerialised.flops

The count covers the work that runs, as far as the jaxpr shows it: dead code is dropped first, as jit does (with full
rematerialisation the last product of a block does not run again). The products of jaxlm's steps equal those in XLA's
optimised programs to the last FLOP, except where XLA pads an odd size to split a product (a vocabulary of 300 to 320 on
an H200); in general XLA may still merge equal work or move it out of a loop. `jaxlm.costs.jaxpr.primitives` has the
cost of one equation. Around it:

- A scan costs its body times its length. A `while` costs its condition and body times its iterations, which are read
  from the program if it compares a counter with a number that is a constant or follows from the NumPy arrays among the
  arguments, in each run of a scan around it, and otherwise given as `trips`.
- A `cond` costs the branch that runs, where that follows from the NumPy arrays among the arguments or from `platform`;
  otherwise its branch with the most FLOPs, then the most bytes.
- `shard_map` costs its body on every shard: figures are sums over the mesh. Outside it figures are those of whole
  arrays, however they are partitioned; collectives that XLA's partitioner places are not in a jaxpr.
- A Pallas kernel costs its `cost_estimate`.
- Loops and calls move only the bytes that their bodies move. An unknown primitive with jaxprs costs each of them once.

Work is `backward` inside a transposition, `rematerialised` where `jax.checkpoint` computes something again for the
backward pass, and otherwise `forward`. An optimizer is `forward` too; its scope tells it apart.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.source_info_util import Transform  # tells jvp(x) from a scope of that name; there is no public name
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.extend.core import Literal as Constant
from jax.interpreters import partial_eval

from jaxlm.costs.jaxpr import primitives
from jaxlm.costs.jaxpr.cost import JaxprCost, Phase, Row
from jaxlm.costs.jaxpr.values import Values, called_jaxpr

# Iterations of loops whose number a program does not state: of all, or by the name or path of a scope. A fraction is
# the mean of a loop that runs in a scan.
Trips = int | Fraction | Mapping[str, int | Fraction] | None
# The scope that jax.checkpoint adds around recomputed work.
_AGAIN = "rematted_computation"


def count(fn: Callable, *args: Any, trips: Trips = None, platform: str | None = None, **kwargs: Any) -> JaxprCost:
    """Count the cost of fn(*args, **kwargs).

    Args:
      fn: any function that `jax.jit` takes. Under `jax.sharding.use_abstract_mesh` (or `jax.set_mesh`) it may use
        meshes of absent devices.
      args, kwargs: trees of arrays or `jax.ShapeDtypeStruct`. The numbers of NumPy arrays are known where loops and
        branches depend on them.
      trips: iterations of each `while` loop whose number the program does not state, or of those in a scope by its
        name or path, of which the longest is taken ("" is any scope); a fraction is the mean of a loop in a scan.
      platform: "cpu", "gpu" or "tpu", whose branch of `jax.lax.platform_dependent` is counted; None counts the dearest
        branch.

    Raises ValueError for such a loop without `trips`, for a Pallas kernel that states no cost, and for a program that
    has no branch for the platform.
    """
    named = fn.func if isinstance(fn, functools.partial) else fn
    jaxpr, name = jax.make_jaxpr(fn)(*args, **kwargs).jaxpr, getattr(named, "__name__", "total")
    return count_jaxpr(jaxpr, trips, name, jax.tree.leaves((args, kwargs)), platform)


def count_jaxpr(
    jaxpr: Jaxpr,
    trips: Trips = None,
    name: str = "total",
    arguments: Sequence[Any] = (),
    platform: str | None = None,
) -> JaxprCost:
    """Count the cost of a jaxpr whose results are all used; its `arguments` may have NumPy arrays among them."""
    live, is_used = partial_eval.dce_jaxpr(jaxpr, True)
    given = list(arguments) or [None] * len(is_used)
    used = (x if isinstance(x, np.ndarray) else None for x, used in zip(given, is_used, strict=True) if used)
    known = [None if x is None else x.astype(v.aval.dtype) for x, v in zip(used, live.invars, strict=True)]
    rows = _RowSums()
    _walk(live, _Place(trips, platform), rows, Values(live, [lambda x=x: x for x in known]))
    return JaxprCost(name, rows.all())


def phase_of(eqn: JaxprEqn, around: Phase) -> Phase:
    """Return the phase of an equation of a jaxpr that stands in a phase."""
    phase = around
    for element in eqn.source_info.name_stack.stack:
        if isinstance(element, Transform):
            if element.name == "transpose" and phase == "forward":
                phase = "backward"
        elif element.name == _AGAIN:
            phase = "rematerialised"
    return phase


class _Place(NamedTuple):
    """The position of an equation in the program, and how often it runs there."""

    trips: Trips
    platform: str | None
    scope: tuple[str, ...] = ()
    phase: Phase = "forward"
    runs: int | Fraction = 1
    shards: int = 1

    def inside(self, eqn: JaxprEqn) -> "_Place":
        """Return the place of an equation of this jaxpr, whose name stack is relative to this place."""
        scope = self.scope
        for element in eqn.source_info.name_stack.stack:
            if not isinstance(element, Transform) and element.name != _AGAIN:
                scope += tuple(filter(None, element.name.split("/")))
        return self._replace(scope=scope, phase=phase_of(eqn, self.phase))

    @property
    def given_trips(self) -> int | Fraction | None:
        """The iterations that the caller gives for a loop here."""
        if not isinstance(self.trips, Mapping):
            return self.trips
        path = f"/{'/'.join(self.scope)}/"
        names = [name for name in self.trips if not name or f"/{name}/" in path]
        return self.trips[max(names, key=len)] if names else None

    def times(self, n: int | Fraction) -> "_Place":
        runs = self.runs * n
        return self._replace(runs=int(runs) if runs.denominator == 1 else runs)


class _RowSums:
    """An accumulator of rows with the same key."""

    def __init__(self) -> None:
        self.sums: dict[tuple, list[int]] = {}

    def add(self, key: tuple, values: Iterable[int]) -> None:
        held = self.sums.setdefault(key, [0, 0, 0, 0])
        for i, value in enumerate(values):
            held[i] += value

    def all(self) -> tuple[Row, ...]:
        return tuple(Row(*key, *values) for key, values in self.sums.items())


def _walk(jaxpr: Jaxpr, place: _Place, rows: _RowSums, values: Values) -> None:
    for eqn in jaxpr.eqns:
        here, name = place.inside(eqn), eqn.primitive.name
        if name == "cond":
            _add_branch(eqn, here, rows, values)
            continue
        parts = None if name in primitives.KNOWN else _parts(eqn, here, values)
        if parts:
            for part, there, known in parts:
                _walk(_open(part), there, rows, known)
            continue
        once = primitives.equation_cost(eqn)
        key = (here.scope, name, once.kind, here.phase, _axes(eqn) if once.kind == "collective" else (), once.assumed)
        everywhere = here.runs * here.shards
        rows.add(key, (here.runs, *(everywhere * n for n in (once.flops, once.bytes_in, once.bytes_out))))


def _add_branch(eqn: JaxprEqn, place: _Place, rows: _RowSums, values: Values) -> None:
    """Add the branch that runs, or the dearest one where it is not known which."""
    branches = eqn.params["branches"]
    if (chosen := _chosen(eqn, place.platform, values)) is not None:
        branches = (branches[chosen],)
    counted = [_RowSums() for _ in branches]
    for branch, its in zip(branches, counted, strict=True):
        _walk(_open(branch), place, its, values.inside(branch, eqn.invars[1:]))

    def price(its: _RowSums) -> tuple[int, int]:
        cost = JaxprCost("", its.all())
        return cost.flops, cost.bytes_in + cost.bytes_out

    for key, values in max(counted, key=price).sums.items():
        rows.add(key, values)


def _chosen(eqn: JaxprEqn, platform: str | None, values: Values) -> int | None:
    """Return the index of the branch that runs, or None where it is not known."""
    if (platforms := eqn.params.get("branches_platforms")) is not None:
        if platform is None:
            return None
        lowered = {"cuda", "rocm"} if platform == "gpu" else {platform}
        of_platform = (i for i, names in enumerate(platforms) if names is None or lowered.intersection(names))
        if (index := next(of_platform, None)) is None:
            raise ValueError(f"the program has no branch for the platform {platform}")
        return index
    index = values(eqn.invars[0])
    return None if index is None else int(np.clip(index, 0, len(eqn.params["branches"]) - 1))


def _parts(eqn: JaxprEqn, place: _Place, values: Values) -> list[tuple[Any, _Place, Values]]:
    """Return the jaxprs that an equation runs, each with its place and the values that are known there."""
    parameters = eqn.params

    def part(jaxpr: Any, at: _Place, operands: Sequence[Any] = (), n: int = 0) -> tuple[Any, _Place, Values]:
        """Return a part of which all runs have the first n of these operands."""
        others = [None] * (len(_open(jaxpr).invars) - n)
        return jaxpr, at, values.inside(jaxpr, [*operands[:n], *others])

    match eqn.primitive.name:
        case "scan":
            body, length = parameters["jaxpr"], parameters["length"]
            known = values.inside_scan(body, eqn.invars, _constants(parameters), length)
            return [(body, place.times(length), known)]
        case "while":
            n = _iterations(eqn, values)
            n = _mean_iterations(eqn, values.of_each_run) if n is None else n
            n = place.given_trips if n is None else n
            if n is None:
                raise ValueError(
                    f"the program does not say how often its while loop in scope {'/'.join(place.scope) or '(none)'} "
                    "runs: pass trips=… to count"
                )
            condition, body, own = parameters["cond_jaxpr"], parameters["body_jaxpr"], parameters["cond_nconsts"]
            return [
                part(condition, place.times(n + 1), eqn.invars, own),
                part(body, place.times(n), eqn.invars[own:], parameters["body_nconsts"]),
            ]
        case "shard_map":
            shards = 1
            for axis in parameters["newly_manual_axes"]:
                shards *= parameters["mesh"].shape[axis]
            return [part(parameters["jaxpr"], place._replace(shards=place.shards * shards))]
        case "custom_linear_solve":
            return [part(parameters["jaxprs"].solve, place)]
        case "linear_call":
            return [part(parameters["callee"], place)]
        case _:
            called = called_jaxpr(eqn)
            if called is not None:
                return [part(called, place, eqn.invars, len(eqn.invars))]
            return [part(jaxpr, place) for jaxpr in jaxprs_in_params(parameters)]


def _constants(parameters: dict[str, Any]) -> int:
    """Return how many operands of a scan are the same in each of its runs; JAX 0.12 keeps them as trees."""
    return len(parameters["ft_in"].unpack()[0]) if "ft_in" in parameters else parameters["num_consts"]


def _open(jaxpr: Any) -> Jaxpr:
    """Return the jaxpr in a closed one (in newer versions of JAX every jaxpr is closed)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _axes(eqn: JaxprEqn) -> tuple[str, ...]:
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(map(str, names)) if isinstance(names, tuple | list | frozenset) else (str(names),)


def _mean_iterations(eqn: JaxprEqn, runs: Sequence[Values]) -> Fraction | None:
    """Return the mean iterations of a `while` in these runs of a scan around it; None where they are not known."""
    iterations = [_iterations(eqn, values) for values in runs]
    return None if not runs or None in iterations else Fraction(sum(iterations), len(runs))


def _iterations(eqn: JaxprEqn, values: Values) -> int | None:
    """Return the iterations of a `while` that compares a counter with a known number, if the counter starts and steps
    by known ones; otherwise None."""
    condition, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])
    carried = len(body.outvars)
    constants, starts = eqn.invars[: len(condition.invars) - carried], eqn.invars[-carried:]
    counters = body.invars[-carried:]
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name not in _MIRRORED:
        return None

    def written(atom: Any) -> int | None:
        known = np.asarray(atom.val) if isinstance(atom, Constant) else values(atom) if atom in outside else None
        return None if known is None or known.ndim else int(known)

    outside = [atom for atom in eqn.invars if not isinstance(atom, Constant)]

    def end_of(atom: Any) -> int | None:
        """Return the value of a variable that the condition reads, if no iteration changes it."""
        places = [i for i, variable in enumerate(condition.invars) if variable is atom]
        if not places:
            return written(atom)
        i = places[0] - len(constants)
        if i < 0:
            return written(constants[i])
        return written(starts[i]) if body.outvars[i] is counters[i] else None

    def step_of(i: int) -> int | None:
        made = [e for e in body.eqns if e.outvars[0] is body.outvars[i]]
        if not made or made[0].primitive.name not in ("add", "sub"):
            return None
        (left, right), adds = made[0].invars, made[0].primitive.name == "add"
        if adds and right is counters[i]:
            left, right = right, left
        n = written(right) if left is counters[i] else None
        return n if n is None or adds else -n

    compare, (left, right) = condition.eqns[0].primitive.name, condition.eqns[0].invars
    if end_of(right) is None:
        compare, left, right = _MIRRORED[compare], right, left
    for i, variable in enumerate(condition.invars[-carried:]):
        start, step, end = written(starts[i]), step_of(i), end_of(right)
        if variable is left and None not in (start, step, end):
            ahead = range(start, end + _PAST_END[compare], step) if step else ()
            towards = step > 0 if compare in ("lt", "le") else step < 0
            return len(ahead) if towards else None
    return None


# Each comparison with its sides exchanged, and how far a counter may go beyond the end.
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_PAST_END = {"lt": 0, "le": 1, "gt": 0, "ge": -1}
