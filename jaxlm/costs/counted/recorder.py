"""Recordings: the doors that a model computes through, read from the jaxpr of its own forward pass.

A recording knows no batch, mesh, chip, implementation or dtype: one of training for each length, and one of the
engine's step, serve every plan of a model. From its edges follow which operations gradients pass, and which
rematerialisation runs again.
"""

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import scan_p

from jaxlm.core.errors import InputError
from jaxlm.costs.counted.axes import Dimensions, Factor, dimensions, factors, products_inside, through
from jaxlm.inference.paged_cache import PageLayout
from jaxlm.inference.ragged_step import Batch, NextTokens, StepResults, ragged_step
from jaxlm.inference.settings import CacheDtype
from jaxlm.inference.step_shapes import TILE, StepShape
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import Dropout
from jaxlm.models.doors.door import MARKER, Marker
from jaxlm.models.doors.elementwise import BETWEEN_DOORS, READS
from jaxlm.models.execution_config import ExecutionConfig, ExpertWay
from jaxlm.models.expert_parallel import GATHERED
from jaxlm.models.kernels import using_kernels
from jaxlm.models.logical_axes import Axes
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.recording import recording
from jaxlm.training.config import NextTokenConfig, ObjectiveConfig, TrainingConfig
from jaxlm.training.objectives import objective

# Products belong to doors: one outside of them would be counted nowhere.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "pallas_call", "ragged_dot"})

# The dtype of a recording that stands for the one that the model computes in; no model asks for it by name.
_COMPUTE = jnp.bfloat16
# The dtype of a recording that stands for that of an engine's pages.
PAGES = "float8_e5m2"

# Equations that take a layer of a stacked parameter.
_PARTS = frozenset({"dynamic_slice", "reshape", "squeeze"})

_NEXT_TOKEN = NextTokenConfig()

# Trees that are only read: a plan asks for the same one several times.
abstract = functools.lru_cache(maxsize=8)(tree.abstract)


class RecordedOp(NamedTuple):
    """One use of a door.

    Attributes:
      marker: the door, the logical axes of its operands and results, and its options.
      scope: the names around it.
      times: number of runs in a forward pass.
      operands, results: the values that the door reads and makes.
      shapes, result_shapes: shapes of operands and results, for one row of a batch.
      dtypes, result_dtypes: dtypes of operands and results; None is the dtype that the model computes in.
      layer: the number of the layer around the door, or None.
      num_query_heads: the query heads that read the key/value heads of an operand or a result, or None.
    """

    marker: Marker
    scope: str
    times: int
    operands: tuple[int, ...]
    results: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str | None, ...]
    result_dtypes: tuple[str | None, ...]
    layer: int | None
    num_query_heads: int | None

    @property
    def name(self) -> str:
        """The name of the door."""
        return self.marker.door.name

    @property
    def options(self) -> dict[str, Any]:
        """The settings that the door's cost depends on."""
        return dict(self.marker.options)


@dataclass
class Recording:
    """The uses of doors in a forward pass in order, and how values are made of one another.

    Values are numbers. `sources` has for each value the values that it is computed from; a value that a loop carries
    comes from its start and from the previous iteration. `parameters` are the paths of values that are parameters,
    `names` the names of values for rematerialisation, `layers` the values that each layer takes as input, and `beside`
    those that it gives besides the residual.
    """

    uses: list[RecordedOp] = field(default_factory=list)
    sources: dict[int, tuple[int, ...]] = field(default_factory=lambda: defaultdict(tuple))
    parameters: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    layers: list[frozenset[int]] = field(default_factory=list)
    beside: list[tuple[int, ...]] = field(default_factory=list)

    def trained(self, frozen: Set[str]) -> frozenset[int]:
        """Return the values that depend on a parameter outside of `frozen`: gradients reach no others."""
        made_of = defaultdict(list)
        for value, sources in self.sources.items():
            for source in sources:
                made_of[source].append(value)
        trained, waiting = set(), [value for value, path in self.parameters.items() if path not in frozen]
        while waiting:
            value = waiting.pop()
            if value not in trained:
                trained.add(value)
                waiting.extend(made_of[value])
        return frozenset(trained)

    @cached_property
    def activations(self) -> frozenset[int]:
        """The values that are made of a parameter, and are none: the others are the same for all layers."""
        return self.trained(frozenset()) - self.parameters.keys()

    def run_again(self, layer: int, wanted: Iterable[int], kept: Set[str]) -> set[int]:
        """Return the values of a layer that must be made again to have the `wanted` ones.

        What the layer begins with is there, and so is what has one of the `kept` names.
        """
        again, waiting = set(), list(wanted)
        while waiting:
            value = waiting.pop()
            if value in again or value in self.layers[layer] or self.names.get(value) in kept:
                continue
            again.add(value)
            waiting.extend(self.sources.get(value, ()))
        return again

    @cached_property
    def by_layer(self) -> dict[int | None, list[RecordedOp]]:
        """The uses of each layer, and those outside of layers under None."""
        layers: dict[int | None, list[RecordedOp]] = defaultdict(list)
        for use in self.uses:
            layers[use.layer].append(use)
        return layers

    @cached_property
    def weights(self) -> dict[int, int]:
        """The index of the first parameter among the operands of each door that reads one, a matrix, a table or a gain,
        by the door's first result."""
        return {
            use.results[0]: next(i for i, value in enumerate(use.operands) if value in self.parameters)
            for use in self.uses
            if not self.parameters.keys().isdisjoint(use.operands)
        }

    def parameter(self, use: RecordedOp) -> str:
        """Return the path of the matrix or table that a door multiplies by or looks up."""
        return next(self.parameters[value] for value in use.operands if value in self.parameters)


@functools.lru_cache(maxsize=64)
def record(
    model: ModelConfig,
    sequence: int,
    dropout: bool,
    lora: LoraConfig | None = None,
    of_text: ObjectiveConfig = _NEXT_TOKEN,
    in_loop: bool = True,
    quantized: Quantization | None = None,
    expert_way: ExpertWay = GATHERED,
) -> Recording:
    """Record the forward pass of a training step over one row of this many tokens, perhaps of a model with adapters or
    quantised matrices, up to its objective of text. Unless `in_loop` the layers are written out, and the first of equal
    ones is recorded apart from the others. `expert_way`: how tokens reach the devices of their experts.

    Raises InputError for a product outside of the doors (`jaxlm.models.doors`).
    """
    graph, parameters = abstract(model, lora, quantized=quantized)

    def forward(parameters: tree.Tree, tokens: jax.Array, key: jax.Array) -> jax.Array:
        module, dropped = nnx.merge(graph, parameters), Dropout(0.5, key) if dropout else Dropout()
        mask, execution = packed_causal_mask(tokens), ExecutionConfig(scan_layers=in_loop)
        with using_kernels("auto", expert_parallel=expert_way):
            hidden, _, _ = module.hidden(tokens, tokens, mask, dropout=dropped, execution=execution)
        batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), tokens)
        losses = objective(of_text, TrainingConfig(sequence=sequence)).sums(module, hidden, batch).losses
        return functools.reduce(operator.add, losses.values())

    tokens = jax.ShapeDtypeStruct((1, sequence), jnp.int32)
    return _read(forward, tree.shapes(parameters, _COMPUTE), tokens, jax.eval_shape(lambda: jax.random.key(0)))


@functools.lru_cache(maxsize=64)
def record_engine(
    model: ModelConfig, page: int, quantized: Quantization | None = None, cache_dtype: CacheDtype | None = None
) -> Recording:
    """Record the engine's step with a single row, whose sequence decodes, for pages of `page` tokens. Equal layers are
    recorded once, although the engine's program has each layer by itself.

    Raises InputError as `record` does.
    """
    graph, parameters = abstract(model, quantized=quantized)
    with recording():
        layout = PageLayout.of(nnx.merge(graph, parameters).slots(), page, cache_dtype)

    def forward(parameters: tree.Tree, *operands: Any) -> StepResults:
        return ragged_step(nnx.merge(graph, parameters), layout, StepShape(1, 0, TILE), *operands)[1]

    groups = range(len(layout.groups))
    pages = jax.eval_shape(lambda: layout.allocate([1 for _ in groups], jnp.dtype(PAGES)))
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    none, table = jax.ShapeDtypeStruct((0,), jnp.int32), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    batch = Batch(row, row, row, row, row, row, row, tuple((table,) for _ in groups), none, none)
    upcoming = NextTokens(row, row, jax.ShapeDtypeStruct((1, 0), jnp.int32))
    valid = jax.ShapeDtypeStruct((model.vocab_size,), jnp.bool)
    return _read(forward, tree.shapes(parameters, _COMPUTE), pages, upcoming, batch, valid)


def _read(forward: Callable[..., Any], parameters: tree.Tree, *operands: Any) -> Recording:
    """Record a function of parameters and other operands."""
    with recording():
        jaxpr = jax.make_jaxpr(forward)(parameters, *operands).jaxpr
    reader = _Reader()
    inputs = [reader.new() for _ in jaxpr.invars]
    reader.recording.parameters.update(zip(inputs, tree.paths(parameters), strict=False))
    reader.read(jaxpr, inputs, (), 1, None)
    return reader.recording


class _Reader:
    """A reader of recorded jaxprs, which numbers their values."""

    def __init__(self) -> None:
        self.recording, self._numbers = Recording(), 0
        # Of values: the query heads that read key/value heads, and the logical axes of what doors made.
        self._query_heads: dict[int, int] = {}
        self._axes: dict[int, Dimensions] = {}
        self._broadcast: set[int] = set()
        self._laid_out: dict[tuple, list[int]] = {}  # of a value by other axes

    def new(self, *sources: int) -> int:
        """Return the number of a new value that is computed from these values."""
        self._numbers += 1
        if sources:
            self.recording.sources[self._numbers] = sources
            heads = next((self._query_heads[source] for source in sources if source in self._query_heads), None)
            if heads is not None:
                self._query_heads[self._numbers] = heads
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
                raise InputError(f"{_place(here)} multiplies outside of the doors of a model (jaxlm.models.doors)")
            elif eqn.primitive is scan_p:
                results = self._scan(eqn, [self.new() if each is None else each for each in operands], here, times)
            elif name in ("checkpoint", "remat2"):  # a layer: recordings show each as what may run again
                inputs = [self.new() if each is None else self._copied(each) for each in operands]
                self.recording.layers.append(frozenset(inputs))
                results = self.read(inner, inputs, here, times, len(self.recording.layers) - 1)
                self.recording.beside.append(tuple(results[1:]))
            elif name in _PARTS and operands[0] in self.recording.parameters:  # of a layer, in its stack
                results = [self._copied(operands[0])]
            elif inner is not None:
                body = getattr(inner, "jaxpr", inner)
                given = [self.new() if each is None else each for each in operands]
                results = self.read(body, given[-len(body.invars) :] if body.invars else [], here, times, layer)
            elif products_inside(eqn, _PRODUCTS | {MARKER.name}):
                raise ValueError(
                    f"{_place(here)} multiplies in a {name}, whose trips or branch no recording knows: use a scan, or "
                    "a door around it"
                )
            elif name == "name":
                results = known
                self.recording.names[results[0]] = eqn.params["name"]
            elif name == "optimization_barrier":
                results = [self.new() if each is None else each for each in operands]
            else:
                results = self._between_doors(eqn, operands, here, times, layer)
            values.update(zip(eqn.outvars, results, strict=True))
        return [self.new() if isinstance(atom, Constant) else values[atom] for atom in jaxpr.outvars]

    def _use(self, eqn: Any, operands: list[int], scope: tuple[str, ...], times: int, layer: int | None) -> list[int]:
        """Add the use of a door and return the numbers of its results."""
        marker: Marker = self._of_rows(eqn.params["marker"], operands)
        key = marker, *operands
        if key in self._laid_out:
            return self._laid_out[key]
        results = [self.new(*operands) for _ in eqn.outvars]
        if len(marker.operands) == 1 and marker.operands != marker.results and not marker.options:
            self._laid_out[key] = results  # XLA gathers a value once, whoever reads it
        heads = dict(marker.options).get("num_query_heads") or self._query_heads.get(results[0])
        for value, axes, atom in zip(results, marker.results, eqn.outvars, strict=True):
            self._axes[value] = dimensions(axes, atom.aval.shape)
            self._query_heads.pop(value, None)
            if heads is not None and "act_kv_heads" in axes:
                self._query_heads[value] = heads
        arrays = [[(tuple(atom.aval.shape), _dtype(atom)) for atom in side] for side in (eqn.invars, eqn.outvars)]
        (shapes, dtypes), (result_shapes, result_dtypes) = (tuple(zip(*each, strict=True)) for each in arrays)
        values = tuple(operands), tuple(results), shapes, result_shapes, dtypes, result_dtypes
        self.recording.uses.append(RecordedOp(marker, "/".join(scope), times, *values, layer, heads))
        return results

    def _of_rows(self, marker: Marker, operands: list[int]) -> Marker:
        """Return the marker of a door with the axis of rows of its first operand: all rows of a batch, or rows that
        were selected from them."""
        first = self._axes.get(operands[0])
        rows = first[0][0].axis if first and first[0] else None
        if rows is None or rows == marker.operands[0][0]:
            return marker
        before = marker.operands[0][0]
        if before != "batch":  # a door that gathers the rows of other devices
            return marker

        def changed(axes: tuple[Axes, ...]) -> tuple[Axes, ...]:
            return tuple((rows, *each[1:]) if each[:1] == (before,) else each for each in axes)

        return marker._replace(operands=changed(marker.operands), results=changed(marker.results))

    def _between_doors(
        self, eqn: Any, operands: list[int | None], scope: tuple[str, ...], times: int, layer: int | None
    ) -> list[int]:
        """Return the numbers of the results of an equation between doors. Add a use if the equation computes each
        element of an array that doors made."""
        results = [self.new(*(value for value in operands if value is not None)) for _ in eqn.outvars]
        if len(results) > 1:
            return results
        axes = through(eqn, [None if value is None else self._axes.get(value) for value in operands])
        if axes is None:
            return results
        (atom,), (result,) = eqn.outvars, results
        name, shape = eqn.primitive.name, tuple(atom.aval.shape)
        self._axes[result] = axes
        if name == "broadcast_in_dim" and math.prod(shape) > math.prod(eqn.invars[0].aval.shape):
            self._broadcast.add(result)  # a view of fewer numbers
        if name not in READS or not jnp.issubdtype(atom.aval.dtype, jnp.floating):
            return results
        inputs = [
            (value, each)
            for value, each in zip(operands, eqn.invars, strict=True)
            if value in self._axes and value not in self._broadcast and tuple(each.aval.shape) == shape
        ]
        flat = tuple(factor.axis for factor in factors(axes))
        sizes = tuple(factor.size for factor in factors(axes))
        marker = Marker(BETWEEN_DOORS, (flat,) * len(inputs), (flat,), (("equation", name),))
        values = tuple(value for value, _ in inputs), tuple(results), (sizes,) * len(inputs), (sizes,)
        dtypes = tuple(_dtype(each) for _, each in inputs), (_dtype(atom),)
        heads = self._query_heads.get(result)
        self.recording.uses.append(RecordedOp(marker, "/".join(scope), times, *values, *dtypes, layer, heads))
        return results

    def _copied(self, operand: int, dropped: int = 0) -> int:
        """Return the number of a value that is another value or a part of it. `dropped`: the first dimensions that the
        part lacks."""
        value = self.new(operand)
        if operand in self.recording.parameters:
            self.recording.parameters[value] = self.recording.parameters[operand]
        if operand in self._axes:
            self._axes[value] = self._axes[operand][dropped:]
        return value

    def _scan(self, eqn: Any, operands: list[int], scope: tuple[str, ...], times: int) -> list[int]:
        """Read the body of a loop once, since all iterations use the same doors."""
        body, (constants, carried) = eqn.params["jaxpr"].jaxpr, constants_and_carried(eqn.params)
        entering = constants + carried
        inputs = [self._copied(operand, int(i >= entering)) for i, operand in enumerate(operands)]
        results = self.read(body, inputs, scope, times * eqn.params["length"], None)
        for value, start, end in zip(inputs[constants:entering], operands[constants:], results, strict=False):
            self.recording.sources[value] = (start, end)
        scanned = [self._axes[value][0] for value in operands[entering:] if self._axes.get(value)]
        first = scanned[0] if scanned else (Factor(None, eqn.params["length"]),)
        return [*results[:carried], *(self._stacked(value, first) for value in results[carried:])]

    def _stacked(self, part: int, first: tuple[Factor, ...]) -> int:
        """Return the number of the array that a loop stacks from a value, along a new first dimension."""
        value = self.new(part)
        if part in self._axes:
            self._axes[value] = (first, *self._axes[part])
        return value


def _place(scope: Sequence[str]) -> str:
    return "/".join(scope) or "the model"


def _dtype(atom: Any) -> str | None:
    """Return the dtype of an array; None is the dtype that the model computes in."""
    dtype = atom.aval.dtype
    return None if dtype == _COMPUTE else str(dtype)


def constants_and_carried(parameters: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a scan are constants and how many it carries; JAX 0.12 keeps them as trees."""
    if "ft_in" not in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carried, _ = parameters["ft_in"].unpack()
    return len(constants), len(carried)
