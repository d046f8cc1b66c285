"""The paper run: the operations that a model uses, read from a recording of its own forward pass.

A recording knows no batch, mesh, chip or implementation: one of each kind of step and length serves every plan of a
model. From its edges follow which operations gradients pass, and which rematerialisation runs again.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr
from jax.extend.core import Literal as Constant

from jaxlm.inference.cache import empty_cache
from jaxlm.inference.steps import decode_step, prefill
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.operations import Dropout, cross_entropy
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.recording import MARKER, Marker, recording
from jaxlm.parallel.rules import Kind

# Products belong to operations: one outside of them would be counted nowhere.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "pallas_call", "ragged_dot"})

# Operations that take a layer of a stacked parameter.
_PARTS = frozenset({"dynamic_slice", "reshape", "squeeze"})

# Trees that are only read: a plan asks for the same one several times.
abstract = functools.lru_cache(maxsize=8)(tree.abstract)


class Use(NamedTuple):
    """One use of an operation: in which scope, how often it runs, and which values it reads and makes.

    `shapes` are those of its operands, for one row of a batch. `loop`: the number of the layer of a loop that it stands
    in, or None.
    """

    marker: Marker
    scope: str
    times: int
    operands: tuple[int, ...]
    results: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    loop: int | None

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.marker.operation

    @property
    def options(self) -> dict[str, Any]:
        """The settings that its cost depends on."""
        return dict(self.marker.options)


@dataclass
class Recording:
    """The operations of a forward pass in order, and how values are made of one another.

    Values are numbers. `sources` has for each value those that it is made of; what a loop carries is made of its start
    and of what the iteration before left. `parameters` are the paths of values that are parameters, `names` what
    rematerialisation calls a value, and `loops` the values with which a layer of a loop begins.
    """

    uses: list[Use] = field(default_factory=list)
    sources: dict[int, tuple[int, ...]] = field(default_factory=lambda: defaultdict(tuple))
    parameters: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    loops: list[frozenset[int]] = field(default_factory=list)

    def trained(self, frozen: Set[str]) -> frozenset[int]:
        """Return the values that depend on a parameter outside of `frozen`: gradients reach no others."""
        readers = defaultdict(list)
        for value, sources in self.sources.items():
            for source in sources:
                readers[source].append(value)
        found, waiting = set(), [value for value, path in self.parameters.items() if path not in frozen]
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                waiting.extend(readers[value])
        return frozenset(found)

    def run_again(self, loop: int, wanted: Iterable[int], kept: Set[str]) -> set[int]:
        """Return the values of a layer that must be made again to have the `wanted` ones.

        What the layer begins with is there, and so is what has one of the `kept` names.
        """
        found, waiting = set(), list(wanted)
        while waiting:
            value = waiting.pop()
            if value in found or value in self.loops[loop] or self.names.get(value) in kept:
                continue
            found.add(value)
            waiting.extend(self.sources.get(value, ()))
        return found


@functools.lru_cache(maxsize=64)
def record(model: ModelConfig, kind: Kind, sequence: int, dropout: bool) -> Recording:
    """Record the forward pass of a step over one row of this many tokens; in decoding the cache holds them.

    Raises ValueError for a product outside of the operations of `jaxlm.models.operations`.
    """
    graph, parameters = abstract(model)
    shapes = tree.shapes(parameters, jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((1, sequence), jnp.int32)
    if kind == "train":

        def forward(parameters: tree.Tree, tokens: jax.Array, key: jax.Array) -> jax.Array:
            module, dropped = nnx.merge(graph, parameters), Dropout(0.5, key) if dropout else Dropout()
            hidden, _, _ = module.hidden(tokens, tokens, packed_causal_mask(tokens), dropout=dropped)
            return cross_entropy(hidden, module.unembedding_table, tokens, tokens > 0, model.logit_soft_cap)["loss"]

        operands = shapes, tokens, jax.eval_shape(lambda: jax.random.key(0))
    else:
        with recording():
            cache = jax.eval_shape(lambda: empty_cache(model, 1, sequence, jnp.bfloat16))
        row = jax.ShapeDtypeStruct((1,), jnp.int32)
        forward = functools.partial(prefill if kind == "prefill" else decode_step, graph)
        operands = (shapes, tokens, row, cache) if kind == "prefill" else (shapes, row, cache)
    with recording():
        jaxpr = jax.make_jaxpr(forward)(*operands).jaxpr
    reader = _Reader()
    paths = list(tree.paths(shapes))
    inputs = [reader.new() for _ in jaxpr.invars]
    reader.found.parameters.update(zip(inputs, paths, strict=False))  # parameters are the first operand
    reader.read(jaxpr, inputs, (), 1, None)
    return reader.found


class _Reader:
    """A reader of recorded jaxprs, which numbers their values."""

    def __init__(self) -> None:
        self.found, self._numbers = Recording(), 0

    def new(self, *sources: int) -> int:
        """Return the number of a new value, made of these."""
        self._numbers += 1
        if sources:
            self.found.sources[self._numbers] = sources
        return self._numbers

    def read(self, jaxpr: Jaxpr, inputs: list[int], scope: tuple[str, ...], times: int, loop: int | None) -> list[int]:
        """Read a jaxpr and return the numbers of its results."""
        values: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {each: self.new() for each in jaxpr.constvars}

        def number(atom: Any) -> int | None:
            return None if isinstance(atom, Constant) else values[atom]

        for eqn in jaxpr.eqns:
            operands = [number(atom) for atom in eqn.invars]
            known = [value for value in operands if value is not None]
            here = (*scope, *(part for each in eqn.source_info.name_stack.stack for part in each.name.split("/")))
            name, inner = eqn.primitive.name, eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive is MARKER:
                results = [self.new(*known) for _ in eqn.outvars]
                shapes = tuple(tuple(atom.aval.shape) for atom in eqn.invars)
                marker = eqn.params["marker"]
                self.found.uses.append(Use(marker, "/".join(here), times, tuple(known), tuple(results), shapes, loop))
            elif name in _PRODUCTS:
                raise ValueError(f"{'/'.join(here) or 'the model'} multiplies outside of the operations of a model")
            elif name == "scan":
                results = self._scan(eqn, [self.new() if each is None else each for each in operands], here, times)
            elif name == "remat2":  # a layer: recordings show each as what rematerialisation may run again
                inputs = [self.new() if each is None else self._copied(each) for each in operands]
                self.found.loops.append(frozenset(inputs))
                results = self.read(inner, inputs, here, times, len(self.found.loops) - 1)
            elif name in _PARTS and operands[0] in self.found.parameters:  # of a layer, in its stack
                results = [self._copied(operands[0])]
            elif inner is not None:
                body = getattr(inner, "jaxpr", inner)
                given = [self.new() if each is None else each for each in operands]
                results = self.read(body, given[-len(body.invars) :] if body.invars else [], here, times, loop)
            else:
                results = known if name == "name" else [self.new(*known) for _ in eqn.outvars]
                if name == "name":
                    self.found.names[results[0]] = eqn.params["name"]
            values.update(zip(eqn.outvars, results, strict=True))
        return [self.new() if isinstance(atom, Constant) else values[atom] for atom in jaxpr.outvars]

    def _copied(self, operand: int) -> int:
        """Return the number of a value that is another one, or a part of a parameter."""
        value = self.new(operand)
        if operand in self.found.parameters:
            self.found.parameters[value] = self.found.parameters[operand]
        return value

    def _scan(self, eqn: Any, operands: list[int], scope: tuple[str, ...], times: int) -> list[int]:
        """Read a loop once; each of its iterations uses the same operations."""
        body, (constants, carried) = eqn.params["jaxpr"].jaxpr, _constants_and_carried(eqn.params)
        inputs = [self._copied(operand) for operand in operands]
        results = self.read(body, inputs, scope, times * eqn.params["length"], None)
        for value, start, end in zip(
            inputs[constants : constants + carried], operands[constants:], results, strict=False
        ):
            self.found.sources[value] = (start, end)
        return results


def _constants_and_carried(parameters: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a scan are constants and how many it carries; JAX 0.12 keeps them as trees."""
    if "ft_in" not in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carried, _ = parameters["ft_in"].unpack()
    return len(constants), len(carried)
