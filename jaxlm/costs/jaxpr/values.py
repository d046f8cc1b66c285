"""Values inside a jaxpr that follow from arguments whose numbers are known: bounds of loops, conditions of branches.

Asks no backend.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant

Value = np.ndarray | None  # None where the numbers are not known


def _broadcast(x: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    sizes = [1] * len(parameters["shape"])
    for axis, size in zip(parameters["broadcast_dimensions"], x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), parameters["shape"])


def _padded(x: np.ndarray, fill: np.ndarray, parameters: dict[str, Any]) -> Value:
    config = parameters["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config):
        return None
    return np.pad(x, [(low, high) for low, high, _ in config], constant_values=fill)


def _sliced(x: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    steps = parameters["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, parameters["start_indices"], parameters["limit_indices"], steps))]


def _rows_of(x: np.ndarray, index: np.ndarray, parameters: dict[str, Any]) -> Value:
    """Return x[index] of an index along the first dimension; None for other gathers."""
    numbers, sizes = parameters["dimension_numbers"], tuple(parameters["slice_sizes"])
    takes_rows = numbers.collapsed_slice_dims == numbers.start_index_map == (0,) and sizes == (1, *x.shape[1:])
    offsets = tuple(range(index.ndim - 1, index.ndim + x.ndim - 2))
    rows = index[..., 0]
    if not takes_rows or numbers.offset_dims != offsets or not ((rows >= 0) & (rows < len(x))).all():
        return None
    return x[rows]


def _converted(x: np.ndarray, parameters: dict[str, Any]) -> Value:
    """Return x in another dtype; None for floats beyond the integers of the dtype, which XLA saturates."""
    dtype = np.dtype(parameters["new_dtype"])
    if x.dtype.kind not in "iub" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not ((x >= limits.min) & (x < limits.max)).all():
            return None
    return x.astype(dtype)


def _sorted(*operands_and_parameters: Any) -> Sequence[Value]:
    """Return arrays in the order of the first; None of each where the order has several keys."""
    *operands, parameters = operands_and_parameters
    if parameters["num_keys"] > 1:
        return [None] * len(operands)
    order = np.argsort(operands[0], axis=parameters["dimension"], kind="stable")
    return [np.take_along_axis(x, order, parameters["dimension"]) for x in operands]


# The rules, by primitive, for values between the arguments and the bound of a loop or the condition of a branch.
_RULES: dict[str, Callable[..., Value]] = {
    "add": lambda x, y, _: x + y,
    "sub": lambda x, y, _: x - y,
    "mul": lambda x, y, _: x * y,
    "max": lambda x, y, _: np.maximum(x, y),
    "min": lambda x, y, _: np.minimum(x, y),
    "div": lambda x, y, _: np.trunc(x / y).astype(x.dtype),  # of integers, towards zero
    "rem": lambda x, y, _: np.fmod(x, y),
    "neg": lambda x, _: -x,
    "sign": lambda x, _: np.sign(x),
    "not": lambda x, _: ~x,
    "and": lambda x, y, _: x & y,
    "or": lambda x, y, _: x | y,
    "eq": lambda x, y, _: x == y,
    "ne": lambda x, y, _: x != y,
    "lt": lambda x, y, _: x < y,
    "le": lambda x, y, _: x <= y,
    "gt": lambda x, y, _: x > y,
    "ge": lambda x, y, _: x >= y,
    "clamp": lambda low, x, high, _: np.clip(x, low, high),
    "select_n": lambda which, *cases_: np.choose(which.astype(int), cases_[:-1]),
    "convert_element_type": _converted,
    "broadcast_in_dim": lambda x, p: _broadcast(x, p),
    "reshape": lambda x, p: x.reshape(p["new_sizes"]),
    "squeeze": lambda x, p: np.squeeze(x, p["dimensions"]),
    "transpose": lambda x, p: np.transpose(x, p["permutation"]),
    "concatenate": lambda *xs: np.concatenate(xs[:-1], xs[-1]["dimension"]),
    "slice": _sliced,
    "pad": _padded,
    "iota": lambda p: _broadcast(np.arange(p["shape"][p["dimension"]], dtype=p["dtype"]), _axis_of(p)),
    "reduce_max": lambda x, p: np.max(x, p["axes"]),
    "reduce_min": lambda x, p: np.min(x, p["axes"]),
    "reduce_sum": lambda x, p: np.sum(x, p["axes"], dtype=x.dtype),
    "reduce_or": lambda x, p: np.bitwise_or.reduce(x, tuple(p["axes"])),
    "reduce_and": lambda x, p: np.bitwise_and.reduce(x, tuple(p["axes"])),
    "gather": _rows_of,
    "sort": _sorted,
    "sharding_constraint": lambda x, _: x,
    "copy": lambda x, _: x,
    "stop_gradient": lambda x, _: x,
}


# Primitives that keep or convert numbers. Floats are known through these alone; comparisons of known floats are known
# too.
_MOVES = frozenset(
    """
    broadcast_in_dim reshape squeeze transpose concatenate slice pad select_n gather convert_element_type copy
    sharding_constraint stop_gradient
    """.split()
)


def _axis_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"shape": parameters["shape"], "broadcast_dimensions": (parameters["dimension"],)}


class Values:
    """The known values of one jaxpr, each computed when it is first asked for.

    Args:
      inputs: for each input of the jaxpr a function that returns its value.
      runs: of the body of a scan a function that returns the values of each run, of which these are those that all runs
        have.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[Callable[[], Value]],
        constants: Sequence[Any] = (),
        runs: Callable[[], Sequence["Values"]] = tuple,
    ):
        self._inputs = dict(zip(jaxpr.invars, inputs, strict=True))
        self._inputs |= {var: (lambda x=x: _small(x)) for var, x in zip(jaxpr.constvars, constants, strict=False)}
        self._makers = {var: (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)}
        self._known: dict[Any, Value] = {}
        self._runs = runs

    def __call__(self, atom: Any) -> Value:
        """Return the value of a variable or a constant, or None where its numbers are not known."""
        if isinstance(atom, Constant):
            return np.asarray(atom.val)
        if atom not in self._known:
            self._known[atom] = self._computed(atom)
        return self._known[atom]

    @functools.cached_property
    def of_each_run(self) -> Sequence["Values"]:
        """The values of each run of the scan around; none where there is no scan."""
        return self._runs()

    def inside(self, jaxpr: Any, operands: Sequence[Any]) -> "Values":
        """Return the values of a jaxpr that an equation calls; those of operands that are None are not known."""
        inputs = [(lambda: None) if atom is None else (lambda atom=atom: self(atom)) for atom in operands]

        def runs() -> Sequence[Values]:
            return [each.inside(jaxpr, operands) for each in self.of_each_run]

        return Values(getattr(jaxpr, "jaxpr", jaxpr), inputs, getattr(jaxpr, "consts", ()), runs)

    def inside_scan(self, body: Any, operands: Sequence[Any], constants: int, length: int) -> "Values":
        """Return the values of the body of a scan. All runs have the first operands, and each its row of those that the
        body sees row by row; what a run hands to the next is not known."""
        inner = getattr(body, "jaxpr", body)
        own = list(zip(operands, inner.invars, strict=True))[constants:]

        def row(atom: Any, var: Any, run: int) -> Value:
            is_sliced = atom.aval.shape != var.aval.shape
            return x[run] if is_sliced and (x := self(atom)) is not None else None

        def of_run(run: int | None) -> Values:
            known = [functools.partial(self, atom) for atom in operands[:constants]]
            known += [(lambda: None) if run is None else functools.partial(row, atom, var, run) for atom, var in own]
            return Values(inner, known, getattr(body, "consts", ()), runs if run is None else tuple)

        def runs() -> Sequence[Values]:
            return [of_run(run) for run in range(length)]

        return of_run(None)

    def _computed(self, var: Any) -> Value:
        if var in self._inputs:
            return self._inputs[var]()
        if var not in self._makers:
            return None
        eqn, index = self._makers[var]
        if (called := called_jaxpr(eqn)) is not None:
            return self.inside(called, eqn.invars)(getattr(called, "jaxpr", called).outvars[index])
        rule = _RULES.get(eqn.primitive.name)
        is_moved = eqn.primitive.name in _MOVES
        if rule is None or not (is_moved or eqn.outvars[0].aval.dtype.kind in "ib"):
            return None
        operands = [self(atom) for atom in eqn.invars]
        if any(x is None for x in operands):
            return None
        found = rule(*operands, eqn.params)
        return found[index] if eqn.primitive.multiple_results else found


def called_jaxpr(eqn: JaxprEqn) -> Any:
    """Return the jaxpr that an equation calls once with its own operands, or None."""
    if eqn.primitive.name in ("scan", "while", "cond", "shard_map", "pallas_call"):
        return None
    called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if called is None or len(getattr(called, "jaxpr", called).invars) != len(eqn.invars):
        return None
    return called


def _small(x: Any) -> Value:
    """Return a constant of a jaxpr as NumPy has it, if it may be part of a bound."""
    return np.asarray(x) if getattr(x, "dtype", np.dtype("O")).kind in "ib" and x.size <= 1 << 16 else None
