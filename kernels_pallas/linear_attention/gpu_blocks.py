"""The parts of arrays that Triton's kernels read and write: a chunk's tokens, and a state's columns."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.core import launch, tuning
from kernels_pallas.core.launch import KernelCost
from kernels_pallas.linear_attention.gpu_tile import multiplied_as, product
from kernels_pallas.linear_attention.operands import ChunkedOperands
from kernels_pallas.linear_attention.tile import Form
from kernels_pallas.linear_attention.unit import unit

HEADS_AXIS = 2  # of query, key and value
_LEAST = 16  # rows and columns of the smallest tiles that tensor cores multiply


class LinearTritonBlocks(NamedTuple):
    """A block of `columns` of the state; `warps` of 32 threads, with loads `stages` ahead."""

    columns: int
    warps: int
    stages: int


class LinearInputs(NamedTuple):
    """Queries, keys and decays as kernels read them, float32.

    Attributes:
      query, key: [B, T, K, H]; of the delta rule divided by their lengths, and the query by √H besides.
      total: the sum of the logarithms of decays from a chunk's first token on, [B, N, T / C, 1, C].
      before: what a token sees of the state before the chunk, as `total`.
      left: what is left after the chunk of what a token wrote, as `total`.
    """

    query: jax.Array
    key: jax.Array
    total: jax.Array
    before: jax.Array
    left: jax.Array


def prepare(is_delta: bool, document: jax.Array, query: jax.Array, key: jax.Array, decay: jax.Array) -> LinearInputs:
    """Return what kernels read of the arrays of `ChunkedOperands`; JAX differentiates this."""
    if is_delta:
        query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)
    query, key = (x.astype(jnp.float32) for x in (query, key))
    total, document = jnp.cumsum(decay, axis=-1), document[:, None]
    before = jnp.exp(jnp.where(document == 0, total, -jnp.inf))
    left = jnp.exp(jnp.where(document == document[..., -1:], total[..., -1:] - total, -jnp.inf))
    return LinearInputs(query, key, total, before, left)


class LinearTiles:
    """The tiles that a kernel reads and writes: of chunk c, value head g of those that share a key, and block j of
    columns. Its references are of one batch entry and one key head.

    Attributes:
      columns, blocks: the numbers of a block of columns, and the blocks.
      width: the numbers of a row of queries, up to a power of two.
      multiplied: the dtype of what tensor cores multiply.
    """

    def __init__(self, operands: ChunkedOperands, name: str, default: LinearTritonBlocks):
        self.sizes = _, _, G, chunks, C, H, V = operands.sizes(HEADS_AXIS)
        self.name, T = name, chunks * C
        self.multiplied = multiplied_as(operands.query.dtype, operands.value.dtype)
        most = max(_LEAST, pl.next_power_of_2(V))
        if self.multiplied == jnp.float32:  # its tiles fill twice the registers
            default = LinearTritonBlocks(min(default.columns, 16), warps=8, stages=1)
        default = default._replace(columns=min(default.columns, most))
        self._launched = tuning.blocks(name, "triton", (T, C, H, V), operands.value.dtype, default)
        self.columns = min(self._launched.columns, most) or most
        self.blocks = pl.cdiv(V, self.columns)
        self.width, wide = max(_LEAST, pl.next_power_of_2(H)), self.blocks * self.columns
        # Of each kind of array, the part in a reference, and its place in blocks of this size.
        self._parts: dict[str, tuple[tuple[int | None, ...], Callable[..., tuple]]] = {
            "query": ((None, T, None, self.width), lambda b, k: (b, 0, k, 0)),
            "value": ((None, T, G, wide), lambda b, k: (b, 0, k, 0)),
            "number": ((None, G, T), lambda b, k: (b, k, 0)),
            "document": ((None, T), lambda b, k: (b, 0)),
            "state": ((None, G, self.width, wide), lambda b, k: (b, k, 0, 0)),
            "states": ((None, G, chunks, self.width, wide), lambda b, k: (b, k, 0, 0, 0)),
            "square": ((None, G, chunks, C, C), lambda b, k: (b, k, 0, 0, 0)),
            "head": ((G,), lambda b, k: (k,)),
        }

    def call(
        self,
        kernel: Callable[[Mapping[str, Any], Mapping[str, Any]], None],
        grid: tuple[int, ...],
        place: Callable[..., tuple[Any, Any]],
        inputs: Mapping[str, tuple[jax.Array, str]],
        outputs: Mapping[str, tuple[tuple[int, ...], Any, str]],
        cost: KernelCost,
    ) -> dict[str, jax.Array]:
        """Run a kernel that takes references of inputs and of outputs by name; return its results by name.

        Args:
          place: returns the batch entry and the key head of a program by its ids.
          inputs: arrays, each with its kind.
          outputs: shapes and dtypes of results, each with its kind.
        """

        def named(*refs: Any) -> None:
            kernel(dict(zip(inputs, refs, strict=False)), dict(zip(outputs, refs[len(inputs) :], strict=True)))

        def spec(kind: str) -> pl.BlockSpec:
            shape, index = self._parts[kind]
            return pl.BlockSpec(shape, lambda *ids: index(*place(*ids)))

        results = launch.call(
            named,
            [x for x, _ in inputs.values()],
            [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs.values()],
            params=launch.triton(self._launched.warps, self._launched.stages),
            grid=grid,
            in_specs=[spec(kind) for _, kind in inputs.values()],
            out_specs=[spec(kind) for *_, kind in outputs.values()],
            cost=cost,
            name=self.name,
        )
        return dict(zip(outputs, results, strict=True))

    def product(self, form: Form, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return a product in float32 of matrices of any dtype."""
        return product(form, a.astype(self.multiplied), b.astype(self.multiplied))

    def of_queries(self, prepared: LinearInputs) -> dict[str, tuple[jax.Array, str]]:
        """Return queries and keys in the dtype that is multiplied, with their kind."""
        return {each: (getattr(prepared, each).astype(self.multiplied), "query") for each in ("query", "key")}

    def of_numbers(
        self, prepared: LinearInputs, operands: ChunkedOperands, *names: str
    ) -> dict[str, tuple[jax.Array, str]]:
        """Return numbers of tokens, of `LinearInputs` and "weight", with their kind."""
        B, K, G, chunks, C, *_ = self.sizes
        known = prepared._asdict() | {"weight": operands.weight}
        return {name: (known[name].reshape(B, K * G, chunks * C), "number") for name in names}

    def of_documents(self, operands: ChunkedOperands) -> dict[str, tuple[jax.Array, str]]:
        """Return the tokens' documents with their kind."""
        B, _, _, chunks, C, *_ = self.sizes
        return {"document": (operands.document.reshape(B, chunks * C), "document")}

    def row(self, ref: Any, g: Any, c: Any) -> jax.Array:
        """Return a number [C] of each token of a chunk."""
        return launch.load(ref.at[g, self._tokens(c)])

    def column(self, ref: Any, g: Any, c: Any) -> jax.Array:
        """Return a number of each token as a column [C, 1]."""
        return self.row(ref, g, c)[:, None]

    def document(self, ref: Any, c: Any) -> jax.Array:
        """Return the documents [C] of a chunk's tokens."""
        return launch.load(ref.at[self._tokens(c)])

    def kept(self, before_ref: Any, g: Any, c: Any) -> jax.Array:
        """Return what is left of the state after a chunk: what the last token sees of it."""
        C = self.sizes[4]
        return before_ref[g, c * C + C - 1]

    def query(self, ref: Any, c: Any) -> jax.Array:
        """Return a chunk's queries or keys [C, width], with zeros beyond their own."""
        return self._load(ref, (self._tokens(c), pl.ds(0, self.width)), columns=self._inside_query(1))

    def store_query(self, ref: Any, c: Any, *, x: jax.Array) -> None:
        """Write what `query` reads."""
        self._store(ref, (self._tokens(c), pl.ds(0, self.width)), x, columns=self._inside_query(1))

    def value(self, ref: Any, g: Any, c: Any, j: Any) -> jax.Array:
        """Return a chunk's values [C, columns]."""
        return self._load(ref, (self._tokens(c), g, self._columns(j)), columns=self._inside_value(j))

    def store_value(self, ref: Any, g: Any, c: Any, j: Any, *, x: jax.Array) -> None:
        """Write what `value` reads."""
        self._store(ref, (self._tokens(c), g, self._columns(j)), x, columns=self._inside_value(j))

    def state(self, ref: Any, j: Any, *at: Any) -> jax.Array:
        """Return a block of a state [width, columns], float32; `at`: the value head, and the chunk where it has one."""
        at = (*at, pl.ds(0, self.width), self._columns(j))
        return self._load(ref, at, self._inside_query(0), self._inside_value(j))

    def store_state(self, ref: Any, j: Any, *at: Any, x: jax.Array) -> None:
        """Write what `state` reads."""
        at = (*at, pl.ds(0, self.width), self._columns(j))
        self._store(ref, at, x, self._inside_query(0), self._inside_value(j))

    def square(self, ref: Any, g: Any, c: Any) -> jax.Array:
        """Return a chunk's matrix [C, C]."""
        return launch.load(ref.at[g, c, pl.ds(0, self.sizes[4]), pl.ds(0, self.sizes[4])])

    def store_square(self, ref: Any, g: Any, c: Any, *, x: jax.Array) -> None:
        """Write what `square` reads."""
        launch.store(ref.at[g, c, pl.ds(0, self.sizes[4]), pl.ds(0, self.sizes[4])], x)

    def store_row(self, ref: Any, g: Any, c: Any, *, x: jax.Array) -> None:
        """Write what `row` reads."""
        launch.store(ref.at[g, self._tokens(c)], x)

    def _tokens(self, c: Any) -> Any:
        C = self.sizes[4]
        return pl.ds(c * C, C)

    def _columns(self, j: Any) -> Any:
        return pl.ds(j * self.columns, self.columns)

    def _inside_query(self, axis: int) -> jax.Array | None:
        """Return which numbers of a query exist, along an axis of a matrix; None if all do."""
        shape = (1, self.width) if axis else (self.width, 1)
        H = self.sizes[5]
        return None if self.width == H else jax.lax.broadcasted_iota(jnp.int32, shape, axis) < H

    def _inside_value(self, j: Any) -> jax.Array | None:
        V, size = self.sizes[6], self.columns
        return None if V % size == 0 else j * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < V

    def _load(self, ref: Any, at: tuple, rows: Any = None, columns: Any = None) -> jax.Array:
        ref = ref.at[at]
        return launch.load(ref, _both(rows, columns, ref.shape))

    def _store(self, ref: Any, at: tuple, x: jax.Array, rows: Any = None, columns: Any = None) -> None:
        launch.store(ref.at[at], x, _both(rows, columns, x.shape))


def _both(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """Return the conjunction of masks [R, 1] and [1, C], as far as there are any."""
    masks = [jnp.broadcast_to(mask, shape) for mask in (rows, columns) if mask is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None
