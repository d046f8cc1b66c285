"""The paper run: the operations that a model uses, read from a recording of its own forward pass.

A recording knows no batch, mesh, chip or implementation: one of each kind of step and length serves every plan of a
model. From its edges follow which operations gradients pass, and which rematerialisation runs again.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from functools import cached_property
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
from jaxlm.models.doors import Dropout
from jaxlm.models.doors.door import MARKER, Marker
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.recording import recording
from jaxlm.parallel.rules import Kind

# Products belong to operations: one outside of them would be counted nowhere.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "pallas_call", "ragged_dot"})

# Operations that take a layer of a stacked parameter.
_PARTS = frozenset({"dynamic_slice", "reshape", "squeeze"})

# What a module computes number by number between operations, and what its backward pass reads: operands, or the result.
_READS_OPERANDS = frozenset({"mul", "div", "max", "min", "pow", "integer_pow", "log", "sin", "cos", "abs", "select_n"})
_READS_RESULT = frozenset({"exp", "exp2", "logistic", "tanh", "rsqrt", "sqrt", "erf"})
_READS_NOTHING = frozenset({"add", "sub", "neg"})
_ELEMENTWISE = _READS_OPERANDS | _READS_RESULT | _READS_NOTHING

# Trees that are only read: a plan asks for the same one several times.
abstract = functools.lru_cache(maxsize=8)(tree.abstract)


class Use(NamedTuple):
    """One use of an operation: in which scope, how often it runs, and which values it reads and makes.

    `shapes` and `made` are those of its operands and results, for one row of a batch. `layer`: the number of the layer
    that it stands in, or None. `readers`: the query heads that read the key/value heads among them, or None.
    """

    marker: Marker
    scope: str
    times: int
    operands: tuple[int, ...]
    results: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]
    layer: int | None
    readers: int | None

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.marker.door

    @property
    def options(self) -> dict[str, Any]:
        """The settings that its cost depends on."""
        return dict(self.marker.options)


@dataclass
class Recording:
    """The operations of a forward pass in order, and how values are made of one another.

    Values are numbers. `sources` has for each value those that it is made of; what a loop carries is made of its start
    and of what the iteration before left. `parameters` are the paths of values that are parameters, `names` what
    rematerialisation calls a value, and `layers` the values with which each layer begins.
    """

    uses: list[Use] = field(default_factory=list)
    sources: dict[int, tuple[int, ...]] = field(default_factory=lambda: defaultdict(tuple))
    parameters: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    layers: list[frozenset[int]] = field(default_factory=list)

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

    @cached_property
    def streams(self) -> frozenset[int]:
        """The values that are made of a parameter, and are none: the others are the same for all layers."""
        return self.trained(frozenset()) - self.parameters.keys()

    def run_again(self, layer: int, wanted: Iterable[int], kept: Set[str]) -> set[int]:
        """Return the values of a layer that must be made again to have the `wanted` ones.

        What the layer begins with is there, and so is what has one of the `kept` names.
        """
        found, waiting = set(), list(wanted)
        while waiting:
            value = waiting.pop()
            if value in found or value in self.layers[layer] or self.names.get(value) in kept:
                continue
            found.add(value)
            waiting.extend(self.sources.get(value, ()))
        return found

    @cached_property
    def by_layer(self) -> dict[int | None, list[Use]]:
        """The uses of each layer, and those outside of layers under None."""
        found: dict[int | None, list[Use]] = defaultdict(list)
        for use in self.uses:
            found[use.layer].append(use)
        return found

    def parameter(self, use: Use) -> str:
        """Return the path of the matrix or table that an operation multiplies by or looks up."""
        return next(self.parameters[value] for value in use.operands if value in self.parameters)


@functools.lru_cache(maxsize=64)
def record(model: ModelConfig, kind: Kind, sequence: int, dropout: bool, lora: LoraConfig | None = None) -> Recording:
    """Record the forward pass of a step over one row of this many tokens; in decoding the cache holds them. A model in
    training may have adapters.

    Raises ValueError for a product outside of the doors (`jaxlm.models.doors`).
    """
    graph, parameters = abstract(model, lora)
    shapes = tree.shapes(parameters, jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((1, sequence), jnp.int32)
    if kind == "train":

        def forward(parameters: tree.Tree, tokens: jax.Array, key: jax.Array) -> jax.Array:
            module, dropped = nnx.merge(graph, parameters), Dropout(0.5, key) if dropout else Dropout()
            hidden, _, _ = module.hidden(tokens, tokens, packed_causal_mask(tokens), dropout=dropped)
            return module.cross_entropy(hidden, tokens, tokens > 0)["loss"]

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
        # Of values: the query heads that read key/value heads, logical axes, and the gathered value.
        self._readers, self._axes, self._gathered = {}, {}, {}

    def new(self, *sources: int) -> int:
        """Return the number of a new value, made of these."""
        self._numbers += 1
        if sources:
            self.found.sources[self._numbers] = sources
            if readers := next((self._readers[source] for source in sources if source in self._readers), None):
                self._readers[self._numbers] = readers
        return self._numbers

    def read(self, jaxpr: Jaxpr, inputs: list[int], scope: tuple[str, ...], times: int, layer: int | None) -> list[int]:
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
                results = self._use(eqn, known, here, times, layer)
            elif name in _PRODUCTS:
                raise ValueError(f"{'/'.join(here) or 'the model'} multiplies outside of the operations of a model")
            elif name == "scan":
                results = self._scan(eqn, [self.new() if each is None else each for each in operands], here, times)
            elif name in ("checkpoint", "remat2"):  # a layer: recordings show each as what may run again
                inputs = [self.new() if each is None else self._copied(each) for each in operands]
                self.found.layers.append(frozenset(inputs))
                results = self.read(inner, inputs, here, times, len(self.found.layers) - 1)
            elif name in _PARTS and operands[0] in self.found.parameters:  # of a layer, in its stack
                results = [self._copied(operands[0])]
            elif inner is not None:
                body = getattr(inner, "jaxpr", inner)
                given = [self.new() if each is None else each for each in operands]
                results = self.read(body, given[-len(body.invars) :] if body.invars else [], here, times, layer)
            elif name == "name":
                results = known
                self.found.names[results[0]] = eqn.params["name"]
            else:
                results = self._elementwise(eqn, operands, here, times, layer)
            values.update(zip(eqn.outvars, results, strict=True))
        return [self.new() if isinstance(atom, Constant) else values[atom] for atom in jaxpr.outvars]

    def _use(self, eqn: Any, operands: list[int], scope: tuple[str, ...], times: int, layer: int | None) -> list[int]:
        """Add the use of an operation and return the numbers of its results."""
        marker = eqn.params["marker"]
        if marker.door == "gather" and operands[0] in self._gathered:
            return [self._gathered[operands[0]]]  # XLA gathers a value once, whoever reads it
        results = [self.new(*operands) for _ in eqn.outvars]
        if marker.door == "gather":
            self._gathered[operands[0]] = results[0]
        shapes, made = (tuple(tuple(atom.aval.shape) for atom in side) for side in (eqn.invars, eqn.outvars))
        readers = dict(marker.options).get("num_query_heads") or self._readers.get(results[0])
        for value, axes in zip(results, marker.results, strict=True):
            self._axes[value] = axes
            self._readers.pop(value, None)
            if "act_kv_heads" in axes:
                self._readers[value] = readers
        path = "/".join(scope)
        self.found.uses.append(Use(marker, path, times, tuple(operands), tuple(results), shapes, made, layer, readers))
        return results

    def _elementwise(
        self, eqn: Any, operands: list[int | None], scope: tuple[str, ...], times: int, layer: int | None
    ) -> list[int]:
        """Return the numbers of what is no operation; add a use where it computes each number of an array that
        operations made."""
        results = [self.new(*(value for value in operands if value is not None)) for _ in eqn.outvars]
        shape, dtype = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype
        alike = [
            value
            for value, atom in zip(operands, eqn.invars, strict=True)
            if value in self._axes and atom.aval.shape == shape
        ]
        if not alike or len(results) > 1 or not jnp.issubdtype(dtype, jnp.floating):
            return results
        self._axes[results[0]] = axes = self._axes[alike[0]]
        if (name := eqn.primitive.name) in _ELEMENTWISE:
            reads = alike if name in _READS_OPERANDS else results if name in _READS_RESULT else []
            marker = Marker("elementwise", (axes,) * len(alike), (axes,), (("reads", tuple(reads)),))
            shapes, readers = (tuple(shape),), self._readers.get(results[0])
            self.found.uses.append(
                Use(
                    *(marker, "/".join(scope), times, tuple(alike), tuple(results)),
                    *(shapes * len(alike), shapes, layer, readers),
                )
            )
        return results

    def _copied(self, operand: int) -> int:
        """Return the number of a value that is another one, or a part of a parameter."""
        value = self.new(operand)
        for known in (self.found.parameters, self._axes):
            if operand in known:
                known[value] = known[operand]
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
