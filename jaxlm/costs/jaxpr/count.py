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
  from the program if it compares a counter with a constant, and otherwise given as `trips`.
- A `cond` costs its branch with the most FLOPs, then the most bytes.
- `shard_map` costs its body on every shard: figures are sums over the mesh. Outside it figures are those of whole
  arrays, however they are partitioned; collectives that XLA's partitioner places are not in a jaxpr.
- A Pallas kernel costs its `cost_estimate`.
- Loops and calls move only the bytes that their bodies move. An unknown primitive with jaxprs costs each of them once.

Work is `backward` inside a transposition, `rematerialised` where `jax.checkpoint` computes something again for the
backward pass, and otherwise `forward`. An optimizer is `forward` too; its scope tells it apart.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src.source_info_util import Transform  # tells jvp(x) from a scope of that name; there is no public name
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.extend.core import Literal as Constant
from jax.interpreters import partial_eval

from jaxlm.costs.jaxpr import primitives
from jaxlm.costs.jaxpr.cost import JaxprCost, Phase, Row

# The scope that jax.checkpoint adds around recomputed work.
_AGAIN = "rematted_computation"


def count(fn: Callable, *args: Any, trips: int | None = None, **kwargs: Any) -> JaxprCost:
    """Count the cost of fn(*args, **kwargs).

    Args:
      fn: any function that `jax.jit` takes. Under `jax.sharding.use_abstract_mesh` (or `jax.set_mesh`) it may use
        meshes of absent devices.
      args, kwargs: trees of arrays or `jax.ShapeDtypeStruct`.
      trips: iterations of each `while` loop whose number the program does not state.

    Raises ValueError for such a loop without `trips`, and for a Pallas kernel that states no cost.
    """
    named = fn.func if isinstance(fn, functools.partial) else fn
    return count_jaxpr(jax.make_jaxpr(fn)(*args, **kwargs).jaxpr, trips, getattr(named, "__name__", "total"))


def count_jaxpr(jaxpr: Jaxpr, trips: int | None = None, name: str = "total") -> JaxprCost:
    """Count the cost of a jaxpr whose results are all used."""
    live, _ = partial_eval.dce_jaxpr(jaxpr, True)
    rows = _RowSums()
    _walk(live, _Place(trips), rows)
    return JaxprCost(name, rows.all())


class _Place(NamedTuple):
    """The position of an equation in the program, and how often it runs there."""

    trips: int | None
    scope: tuple[str, ...] = ()
    phase: Phase = "forward"
    runs: int = 1
    shards: int = 1

    def inside(self, eqn: JaxprEqn) -> "_Place":
        """Return the place of an equation of this jaxpr, whose name stack is relative to this place."""
        scope, phase = self.scope, self.phase
        for element in eqn.source_info.name_stack.stack:
            if isinstance(element, Transform):
                if element.name == "transpose" and phase == "forward":
                    phase = "backward"
            elif element.name == _AGAIN:
                phase = "rematerialised"
            else:
                scope += tuple(filter(None, element.name.split("/")))
        return self._replace(scope=scope, phase=phase)

    def times(self, n: int) -> "_Place":
        return self._replace(runs=self.runs * n)


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


def _walk(jaxpr: Jaxpr, place: _Place, rows: _RowSums) -> None:
    for eqn in jaxpr.eqns:
        here, name = place.inside(eqn), eqn.primitive.name
        if name == "cond":
            _add_dearest(eqn.params["branches"], here, rows)
            continue
        parts = None if name in primitives.KNOWN else _parts(eqn, here)
        if parts:
            for part, there in parts:
                _walk(part, there, rows)
            continue
        once = primitives.equation_cost(eqn)
        key = (here.scope, name, once.kind, here.phase, _axes(eqn) if once.kind == "collective" else (), once.assumed)
        everywhere = here.runs * here.shards
        rows.add(key, (here.runs, *(everywhere * n for n in (once.flops, once.bytes_in, once.bytes_out))))


def _add_dearest(branches: Sequence[Any], place: _Place, rows: _RowSums) -> None:
    counted = [_RowSums() for _ in branches]
    for branch, its in zip(branches, counted, strict=True):
        _walk(_open(branch), place, its)

    def price(its: _RowSums) -> tuple[int, int]:
        cost = JaxprCost("", its.all())
        return cost.flops, cost.bytes_in + cost.bytes_out

    for key, values in max(counted, key=price).sums.items():
        rows.add(key, values)


def _parts(eqn: JaxprEqn, place: _Place) -> list[tuple[Jaxpr, _Place]]:
    """Return the jaxprs that an equation runs, each with its place."""
    parameters = eqn.params
    match eqn.primitive.name:
        case "scan":
            return [(_open(parameters["jaxpr"]), place.times(parameters["length"]))]
        case "while":
            n = _iterations(eqn)
            n = place.trips if n is None else n
            if n is None:
                raise ValueError(
                    f"the program does not say how often its while loop in scope {'/'.join(place.scope) or '(none)'} "
                    "runs: pass trips=… to count"
                )
            condition, body = _open(parameters["cond_jaxpr"]), _open(parameters["body_jaxpr"])
            return [(condition, place.times(n + 1)), (body, place.times(n))]
        case "shard_map":
            shards = 1
            for axis in parameters["newly_manual_axes"]:
                shards *= parameters["mesh"].shape[axis]
            return [(parameters["jaxpr"], place._replace(shards=place.shards * shards))]
        case "custom_linear_solve":
            return [(_open(parameters["jaxprs"].solve), place)]
        case "linear_call":
            return [(_open(parameters["callee"]), place)]
        case _:
            return [(jaxpr, place) for jaxpr in jaxprs_in_params(parameters)]


def _open(jaxpr: Any) -> Jaxpr:
    """Return the jaxpr in a closed one (in newer versions of JAX every jaxpr is closed)."""
    return jaxpr.jaxpr


def _axes(eqn: JaxprEqn) -> tuple[str, ...]:
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(map(str, names)) if isinstance(names, tuple | list | frozenset) else (str(names),)


def _iterations(eqn: JaxprEqn) -> int | None:
    """Return the iterations of a `while` that compares a counter with a constant, if the counter starts and steps by
    constants; otherwise None."""
    condition, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])
    carried = len(body.outvars)
    constants, starts = eqn.invars[: len(condition.invars) - carried], eqn.invars[-carried:]
    counters = body.invars[-carried:]
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name not in _MIRRORED:
        return None

    def written(atom: Any) -> int | None:
        return int(atom.val) if isinstance(atom, Constant) else None

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
