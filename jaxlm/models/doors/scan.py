"""Recurrences over the tokens of documents, computed in chunks: a scan from one chunk to the next, within which a
recurrence computes in parallel."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.core.errors import InputError
from jaxlm.models import kernels
from jaxlm.models.doors.cost import DoorCost, DoorProduct, Local, LocalArray, ProductKernel, Saved, Traced, Workspace
from jaxlm.models.doors.door import Signature, door
from jaxlm.models.logical_axes import Axes
from jaxlm.parallel.partition import is_sharded
from kernels_pallas.core import target
from kernels_pallas.core.chunk_scan import scan_chunks
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.core.target import TargetChip
from kernels_pallas.paged_attention.costs import SectionReads

States = dict[str, jax.Array]  # by slot, [B, *shape]
TokenArray = tuple[jax.Array, Axes]  # [B, T, …], or a weight, with its logical axes


class ChunkRows(NamedTuple):
    """The tokens of a chunk.

    Attributes:
      is_token_BC: bool; padding follows the tokens of a row.
      begins_BC: bool, whether a document begins with a token.
    """

    is_token_BC: jax.Array
    begins_BC: jax.Array

    @property
    def document_BC(self) -> jax.Array:
        """The documents that have begun up to each token, int32: 0 is the one that the states before the chunk are of,
        and equal numbers are of one document."""
        return jnp.cumsum(self.begins_BC & self.is_token_BC, axis=1, dtype=jnp.int32)

    @property
    def length_B(self) -> jax.Array:
        """The tokens of each row, int32."""
        return jnp.sum(self.is_token_BC, axis=1, dtype=jnp.int32)


# Takes the states before a chunk, [B, *shape], its rows, arrays [B, C, …] and weights, and returns the states after its
# last token and the outputs [B, C, …]. A document that begins in the chunk reads none of the states before it. Padding
# changes no state; its outputs are anything. The function closes over no array, so that gradients and costs are known.
Chunk = Callable[..., tuple[States, jax.Array]]
# Takes arrays [B, T, …], weights, the states before the tokens, and what `ChunkRows` has of them, one after the other,
# with the options `chunk`, the most tokens of a chunk, and `implementation`; returns the outputs and the states after.
Operation = Callable[..., tuple[jax.Array, ...]]
# Takes a chip, the shapes and dtypes of the arrays [B, T, …] of a call, and the most tokens of a chunk.
KernelWork = Callable[[TargetChip, Sequence[jax.ShapeDtypeStruct], int], "ScanKernel | None"]


class ScanKernel(NamedTuple):
    """The kernels of an implementation that compute an operation on a chip.

    Attributes:
      name: of the implementation.
      products: of the forward pass. again: those that the backward pass computes besides their gradients.
      padding: bytes that what the backward pass reads takes beyond its numbers.
      workspace: the most bytes that the kernels of the forward pass need at once besides, and those of the backward.
    """

    name: str
    costs: KernelCosts
    products: tuple[DoorProduct, ...]
    again: tuple[DoorProduct, ...]
    padding: int
    workspace: tuple[int, int]


class ScanOperation(NamedTuple):
    """An operation of `kernels_pallas`.

    Attributes:
      work: returns the kernel that computes a call on a chip, or None for XLA.
      size: returns the most tokens of a chunk on a platform; None is one that is not known.
    """

    run: Operation
    work: KernelWork
    size: Callable[[str | None], int]


class Recurrence(NamedTuple):
    """A recurrence over the tokens of documents.

    Attributes:
      chunk: computes a chunk, as chunk(states, rows, *inputs, *weights).
      first: by slot, the state [*shape] before the first token of a document, and its logical axes.
      axes: the logical axes of the outputs, [B, T, …].
      size: the most tokens of a chunk; None: what the operation takes at once, or else all tokens of a pass.
      weights: arrays that all tokens read, each with its logical axes.
      operation: computes all tokens of a pass, where `kernels_pallas` has an operation that does.
    """

    chunk: Chunk
    first: Mapping[str, tuple[jax.Array, Axes]]
    axes: Axes
    size: int | None = None
    weights: tuple[TokenArray, ...] = ()
    operation: ScanOperation | None = None

    def initial_states(self, sequences: int) -> States:
        """Return the states [B, *shape] of sequences that begin."""
        return {name: jnp.broadcast_to(x[None], (sequences, *x.shape)) for name, (x, _) in self.first.items()}


def _signature(recurrence: Recurrence, states: States, rows: ChunkRows, *inputs: TokenArray) -> Signature:
    # An engine has a state for each run of rows, whose number the calls say.
    axes = {name: (None, *of_state) for name, (_, of_state) in recurrence.first.items()}
    per_token = [(x, recurrence.axes[:2]) for x in rows]
    weights = recurrence.weights

    def first(states: States, rows: ChunkRows, inputs: list[jax.Array], weights: list[jax.Array]) -> jax.Array:
        size = chunk_tokens(recurrence.size, recurrence.operation, None)
        rows, inputs = jax.tree.map(lambda x: x[:, :size], (rows, inputs))
        return recurrence.chunk(states, rows, *inputs, *weights)[1]

    output = jax.eval_shape(first, states, rows, [x for x, _ in inputs], [x for x, _ in weights])
    outputs = jax.ShapeDtypeStruct((*rows.is_token_BC.shape, *output.shape[2:]), output.dtype)
    results = [(outputs, recurrence.axes), *((x, axes[name]) for name, x in states.items())]
    operands = [*inputs, *weights, *((x, axes[name]) for name, x in states.items()), *per_token]
    function = _FlatChunk(recurrence.chunk, tuple(states), len(inputs), len(inputs) + len(weights))
    return Signature(operands, results, {"chunk": function, "size": recurrence.size, "operation": recurrence.operation})


@dataclass(frozen=True)
class _FlatChunk:
    """A chunk's function of its inputs, weights, states and what tells of its tokens, one after the other.

    It returns the outputs and, where these are `kept`, the states. `before`: the inputs and weights together.
    """

    chunk: Chunk
    states: tuple[str, ...]
    inputs: int
    before: int
    kept: bool = True

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        states = dict(zip(self.states, arrays[self.before : -2], strict=True))
        after, outputs = self.chunk(states, ChunkRows(*arrays[-2:]), *arrays[: self.before])
        return outputs, *(after[name] for name in self.states if self.kept)


class _Calls(NamedTuple):
    """Calls of the door, `times` of them one after the other, on [B, T] tokens each, in chunks of C; the last chunk is
    padded."""

    B: int
    T: int
    C: int
    times: int

    @property
    def chunks(self) -> int:
        return math.ceil(self.T / self.C)


def _calls(local: Local) -> list[_Calls]:
    """Return the calls on one device. An engine scans the sequences of its decode section in one call, and the tiles
    of prompts one after the other; rows one by one where its chunks are of one token."""
    how = local.options["size"], local.options["operation"], local.platform
    size = chunk_tokens(*how, is_engine=bool(local.sections))

    def of(rows: int, tokens: int, times: int = 1) -> _Calls:
        return _Calls(rows, tokens, min(size or tokens, tokens), times)

    if not local.sections:
        return [of(*local.results[0].shape[:2])]
    sections = [(each.sequences, each.queries, isinstance(each, SectionReads)) for each in local.sections]
    if size == 1:
        return [of(1, 1, times=n * queries) for n, queries, _ in sections if n]
    return [of(1, queries, n) if paged and queries > 1 else of(n, queries) for n, queries, paged in sections if n]


def _check_whole(is_shared: bool) -> None:
    """Raise InputError where devices share sequences."""
    if is_shared:
        raise InputError("a layer that carries states reads the tokens of a sequence in order: set mesh.context to 1")


def _declare(local: Local) -> DoorCost:
    """Return the cost of all chunks. Between several the states are kept; those after a single one are read by nobody
    in training, and those before it are none that train."""
    *arrays, is_token, begins = local.operands
    _check_whole(is_token.sharded[1])
    function, calls = local.options["chunk"], _calls(local)
    inputs, weights = arrays[: function.inputs], arrays[function.inputs : function.before]
    states = arrays[function.before :]
    per_token, chunks = [*inputs, is_token, begins], calls[0].times * calls[0].chunks
    of_token = sum(math.prod(x.shape[2:]) * x.itemsize for x in (*per_token, local.results[0]))
    of_states = sum(math.prod(x.shape[1:]) * x.itemsize for x in states)
    trained = [i for i, x in enumerate(arrays) if x.is_trained or (chunks > 1 and i >= function.before)]
    if local.training and chunks == 1:
        function = replace(function, kept=False)

    def traced(call: _Calls) -> Traced:
        B, C, times = call.B, call.C, call.times * call.chunks
        operands = [
            *((B, C, *x.shape[2:]) for x in inputs),
            *(x.shape for x in weights),
            *((B, *x.shape[1:]) for x in states),
        ]
        shapes = [*zip(operands, (x.dtype for x in arrays), strict=True), *(((B, C), x.dtype) for x in per_token[-2:])]
        moved = times * (B * (C * of_token + 2 * of_states) + sum(x.bytes for x in weights))
        # An engine writes the states after a run of rows into pages, which XLA does by a copy.
        copied = 2 * call.times * B * of_states if local.sections else 0
        return Traced(function, tuple(shapes), tuple(trained), times, moved, chunks > 1, copied)

    kernels = [_kernel(local, inputs, call) for call in calls]
    padding = sum(kernel.padding for kernel in kernels if kernel is not None)
    saved = Saved(tuple(range(function.inputs)), bytes=chunks * calls[0].B * of_states + padding)
    handed = [kernel.workspace for kernel in kernels if kernel is not None]
    workspace = Workspace(
        beside=2 * max(call.B for call in calls) * of_states,  # before and after a chunk
        between_kernels=(max((each for each, _ in handed), default=0), max((each for _, each in handed), default=0)),
    )
    by_xla = tuple(traced(call) for call, kernel in zip(calls, kernels, strict=True) if kernel is None)
    of_kernels = [(kernel, call.times) for kernel, call in zip(kernels, calls, strict=True) if kernel is not None]
    cost = DoorCost(traced=by_xla, saved=saved, workspace=workspace)
    return cost._replace(**_of_kernels(of_kernels, local.training)) if of_kernels else cost


def _kernel(local: Local, inputs: Sequence[LocalArray], call: _Calls) -> ScanKernel | None:
    """Return the kernel that computes a call; None if XLA does."""
    operation = local.options["operation"]
    if operation is None or not local.kernels or local.platform == "cpu":
        return None
    chip = target.of_kind(local.platform, local.device_kind) if local.device_kind else target.any_of(local.platform)
    structs = [jax.ShapeDtypeStruct((call.B, call.T, *x.shape[2:]), x.dtype) for x in inputs]
    return operation.work(chip, structs, chunk_tokens(local.options["size"], operation, local.platform))


def _of_kernels(kernels: Sequence[tuple[ScanKernel, int]], training: bool) -> dict[str, Any]:
    """Return the products and the costs of kernels, each with its number of calls."""

    def every(of: str) -> tuple[DoorProduct, ...]:
        return tuple(x._replace(times=x.times * times) for kernel, times in kernels for x in getattr(kernel, of))

    summed = (
        KernelCost(*(sum(times * getattr(kernel.costs, way)[i] for kernel, times in kernels) for i in range(3)))
        for way in ("forward", "backward")
    )
    products, again = every("products"), every("again") if training else ()
    gradients = tuple(each.gradients or (True, True) for each in products) if training else ()
    return {"products": products, "kernel": ProductKernel(kernels[0][0].name, KernelCosts(*summed), again, gradients)}


@door(_signature, _declare, name="scan")
def _scan(recurrence: Recurrence, states: States, rows: ChunkRows, *inputs: TokenArray) -> tuple[jax.Array, ...]:
    """Return the outputs [B, T, …] and the states after the last token, in their order."""
    _check_whole(is_sharded("sequence"))
    arrays, weights = tuple(x for x, _ in inputs), [x for x, _ in recurrence.weights]
    if recurrence.operation is not None:
        of_states = [(states[name], ("batch", *of_state)) for name, (_, of_state) in recurrence.first.items()]
        return kernels.run(
            recurrence.operation.run,
            *(*inputs, *recurrence.weights, *of_states, *((x, recurrence.axes[:2]) for x in rows)),
            results=(recurrence.axes, *(axes for _, axes in of_states)),
            chunk=chunk_tokens(recurrence.size, recurrence.operation, target.platform()),
        )

    def one(states: States, chunk: tuple[ChunkRows, tuple[jax.Array, ...]]) -> tuple[States, jax.Array]:
        after, outputs = recurrence.chunk(states, chunk[0], *chunk[1], *weights)
        return {name: after[name].astype(x.dtype) for name, x in states.items()}, outputs

    states, outputs_BT = scan_chunks(one, states, (rows, arrays), recurrence.size or rows.is_token_BC.shape[1])
    return outputs_BT, *states.values()


def scan(recurrence: Recurrence, states: States, rows: ChunkRows, *inputs: TokenArray) -> tuple[jax.Array, States]:
    """Carry states through T tokens; return the outputs [B, T, …] and the states after the last token.

    Args:
      states: those before the first token, by slot, [B, *shape].
      rows: the T tokens.
      inputs: arrays [B, T, …], each with its logical axes.
    """
    outputs_BT, *after = _scan(recurrence, states, rows, *inputs)
    return outputs_BT, dict(zip(states, after, strict=True))


def chunk_tokens(
    size: int | None, operation: ScanOperation | None, platform: str | None, *, is_engine: bool = False
) -> int | None:
    """Return the most tokens of a chunk on a platform, for a recurrence of this size and operation; None is all of a
    pass. Those of an engine that is exact, as it is by default on a CPU, have one token."""
    if size is None and operation is not None:
        size = operation.size(platform)
    return 1 if is_engine and size is not None and platform == "cpu" else size


def by_token(
    step: Callable[..., tuple[States, jax.Array]],
    first: Mapping[str, tuple[jax.Array, Axes]],
    axes: Axes,
    size: int = 64,
) -> Recurrence:
    """Return the recurrence that takes one token after the other.

    Args:
      step: takes the states before a token, [B, *shape], and inputs [B, …], and returns the states after it and the
        outputs [B, …]. It closes over no array.
      first, axes, size: as in `Recurrence`.
    """

    def chunk(states: States, rows: ChunkRows, *inputs: jax.Array) -> tuple[States, jax.Array]:
        def one(states: States, token: tuple[Any, ...]) -> tuple[States, jax.Array]:
            is_token_B, begins_B, *inputs_B = token
            states = {name: where_rows(begins_B, first[name][0][None], x) for name, x in states.items()}
            after, outputs_B = step(states, *inputs_B)
            return {name: where_rows(is_token_B, after[name], x) for name, x in states.items()}, outputs_B

        states, outputs_CB = jax.lax.scan(one, states, tuple(jnp.swapaxes(x, 0, 1) for x in (*rows, *inputs)))
        return states, jnp.swapaxes(outputs_CB, 0, 1)

    return Recurrence(chunk, first, axes, size)


def last_tokens(count: int, shape: tuple[int, ...], axes: Axes, slot: str, dtype: jnp.dtype) -> Recurrence:
    """Return the recurrence whose outputs are each token's array with those of the `count` tokens before it in its
    document, [B, T, count + 1, *shape], the oldest first, as a short convolution reads them.

    Its state [count, *shape] is the last tokens' arrays. Where a document has fewer it is zero.

    Args:
      shape: of a token's array, with the logical axes `axes`.
      slot: the name of its state.
    """

    def chunk(states: States, rows: ChunkRows, x: jax.Array) -> tuple[States, jax.Array]:
        return {slot: tail_after(states[slot], rows, x)}, jnp.stack(windows(states[slot], rows, x), axis=2)

    first = {slot: (jnp.zeros((count, *shape), dtype), (None, *axes))}
    return Recurrence(chunk, first, ("batch", "sequence", None, *axes))


def windows(tail: jax.Array, rows: ChunkRows, x: jax.Array) -> list[jax.Array]:
    """Return each token's array before and including itself, the oldest first: x [B, C, …] after those of the tail
    [B, count, …], each shifted by so many tokens, and zero where its token is of another document."""
    C, document_BC = x.shape[1], rows.document_BC
    whole, document = _with_tail(tail, document_BC, x)
    return [_among(whole[:, i : i + C], document[:, i : i + C], document_BC) for i in range(tail.shape[1] + 1)]


def tail_after(tail: jax.Array, rows: ChunkRows, x: jax.Array) -> jax.Array:
    """Return the tail [B, count, …] after x [B, C, …]: its last tokens, zero where they are of another document."""
    index_BK = rows.length_B[:, None] + jnp.arange(tail.shape[1])[None]
    last, of_last = (
        jnp.take_along_axis(array, index_BK.reshape(*index_BK.shape, *[1] * (array.ndim - 2)), axis=1)
        for array in _with_tail(tail, rows.document_BC, x)
    )
    return _among(last, of_last, of_last[:, -1:])


def _with_tail(tail: jax.Array, document_BC: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x after its tail, [B, count + C, …], and the document of each token."""
    of_tail = jnp.zeros(tail.shape[:2], jnp.int32)
    return jnp.concatenate([tail.astype(x.dtype), x], axis=1), jnp.concatenate([of_tail, document_BC], axis=1)


def _among(x: jax.Array, document: jax.Array, last: jax.Array) -> jax.Array:
    """Return x where its tokens are of these documents, zero elsewhere."""
    return jnp.where((document == last).reshape(*document.shape, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def where_rows(is_so_B: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """Choose between arrays [B, …] for each row, in the dtype of the second."""
    return jnp.where(is_so_B.reshape(-1, *[1] * (no.ndim - 1)), yes.astype(no.dtype), no)
