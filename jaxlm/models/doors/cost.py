"""The declaration of a door's cost: what it is told of one device, and what it says.

A door knows the shapes and dtypes of its arrays on one device, the platform and whether kernels run there; it knows no
mesh, no batch and no rematerialisation. What XLA keeps and fuses was read from its programs (`jaxlm.lowering.buffers`),
and stands beside the door it is of.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models.execution_config import ContextParallel
from jaxlm.models.logical_axes import GATHERED, Axes
from kernels_pallas.core.launch import KernelCost, KernelCosts
from kernels_pallas.grouped_matmul.visits import TileRows
from kernels_pallas.paged_attention.costs import SectionReads


@functools.cache
def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


class LocalArray(NamedTuple):
    """An array on one device, of the rows that it computes at once.

    Attributes:
      shape, dtype: there.
      sharded: of each dimension, whether other devices have other parts of it.
      is_trained: gradients reach it.
    """

    shape: tuple[int, ...]
    dtype: str
    sharded: tuple[bool, ...]
    is_trained: bool = False

    @property
    def numbers(self) -> int:
        """The numbers of the array."""
        return math.prod(self.shape)

    @property
    def abstract(self) -> Any:
        """The shape and dtype, as the costs of kernels take an array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return _itemsize(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return self.numbers * self.itemsize


class UnpaddedReads(NamedTuple):
    """Sequences of `keys` tokens, of which the last `queries` are the queries, without an engine's padding."""

    sequences: int
    queries: int
    keys: int


class Local(NamedTuple):
    """One use of a door on one device.

    Attributes:
      settings: the options of the door's signature.
      device_kind: JAX's name of the chip's devices; None: any of the platform.
      kernels: whether kernels of kernels_pallas run, wherever they serve.
      deterministic: whether their gradients have to be bit-equal in each run.
      context_parallel: how devices that share a sequence attend to one another's tokens, as it is asked for.
      sections: the sections of an engine step's rows, each with what its rows read in all steps of that shape; none in
        training.
    """

    operands: tuple[LocalArray, ...]
    results: tuple[LocalArray, ...]
    settings: tuple[tuple[str, Any], ...]
    platform: Literal["gpu", "tpu", "cpu"]
    device_kind: str | None
    kernels: bool
    deterministic: bool
    training: bool
    sections: tuple[SectionReads | UnpaddedReads, ...] = ()
    context_parallel: ContextParallel = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the door's signature."""
        return dict(self.settings)


class Product(NamedTuple):
    """`batch` products [m, k] × [k, n] at once."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    def gradients(self) -> tuple["Product", "Product"]:
        """Return the products that give the gradients of both operands."""
        return Product(self.batch, self.m, self.n, self.k), Product(self.batch, self.k, self.m, self.n)


class VisibleFraction(NamedTuple):
    """The fraction of the scores of all queries and keys that windows leave, and that causality leaves besides."""

    whole: Fraction
    causal: Fraction


class DoorProduct(NamedTuple):
    """A matrix product of a door.

    Attributes:
      product: its sizes on one device.
      bytes: of what it reads and writes at least.
      unfused: bytes more that it moves where its result goes through memory between it and what is fused into it.
      weight: the operand of the door that it multiplies by, where that is a parameter.
      scope: in that of the door.
      gradients: whether the gradient of each of its operands is computed; None: of those that train.
      visible: of its scores, which stay inside the door: the backward pass asks for them again, whatever is kept.
      times: so many in a use of the door.
      groups: the number of groups of its rows, each with a matrix of its own; None of a product with one matrix.
      tiles: of such a product, the rows that its tiles compute.
      dtype: in which numbers are multiplied; None: that of the step.
      again: the backward pass computes it once more, whatever is kept.
    """

    product: Product
    bytes: int
    unfused: int = 0
    weight: int | None = None
    scope: str = ""
    gradients: tuple[bool, bool] | None = None
    visible: VisibleFraction | None = None
    times: int = 1
    groups: int | None = None
    tiles: TileRows | None = None
    dtype: str | None = None
    again: bool = False


class ProductKernel(NamedTuple):
    """A kernel that computes all products of a door. `name`: of its implementation. `again`: those that its backward
    pass computes besides their gradients. `gradients`: for both operands of each product, whether their gradient is
    computed; none in inference."""

    name: str
    costs: KernelCosts
    again: tuple[DoorProduct, ...]
    gradients: tuple[tuple[bool, bool], ...] = ()


class Loop(NamedTuple):
    """The cost of a loop of XLA's per number of an array: FLOPs, and reads and writes in `float32` and in the array's
    dtype (`narrow`)."""

    flops: float
    float32: float
    narrow: float

    def over(self, numbers: int, itemsize: int) -> KernelCost:
        """Return the cost over so many numbers of `itemsize` bytes."""
        moved = numbers * (4 * self.float32 + itemsize * self.narrow)
        return KernelCost(flops=round(numbers * self.flops), bytes=round(moved))


class CountedFunction(NamedTuple):
    """A function of float32 arrays of these shapes whose FLOPs are counted in its jaxpr, as those of its derivative
    are, and which is called so many times."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    times: int


PassKind = Literal["pass", "norm", "rms_norm", "activation", "gated", "bias", "rope", "add", "scores"]


class Pass(NamedTuple):
    """Work element by element in `times` loops: one of XLA's, which may be fused into a neighbour, or a kernel.

    Attributes:
      forward, backward: the cost of one.
      scope: in that of the door.
      counted: adds its FLOPs to both.
      fused_once: outside of layers, where it is done once, XLA fuses it into what reads it.
      kind: the kernel that it is in a framework that runs each operation as one; `scores`: a part of attention.
    """

    forward: KernelCost
    backward: KernelCost
    scope: str = ""
    times: int = 1
    kernel: bool = False
    counted: CountedFunction | None = None
    fused_once: bool = False
    kind: PassKind = "pass"


class Traced(NamedTuple):
    """A function that a door calls, whose products and other FLOPs are counted in its own jaxpr.

    Attributes:
      function: of arrays, to arrays; hashable.
      operands: the shape and dtype of each on one device.
      trained: the operands whose gradients are computed.
      times: calls.
      bytes: that all calls together read and write at least.
      checkpointed: the backward pass calls it again.
      copied: bytes that results are read and written once more, in all calls together.
    """

    function: Callable[..., Any]
    operands: tuple[tuple[tuple[int, ...], str], ...]
    trained: tuple[int, ...]
    times: int
    bytes: int
    checkpointed: bool
    copied: int = 0


class Saved(NamedTuple):
    """The values that the backward pass reads.

    Attributes:
      operands, results: by index.
      instead: bytes that a loop over layers keeps in the place of these values where everything is kept: it stacks what
        the derivatives of equations read. Where layers are written out XLA makes that again of these values.
      bytes: kept besides them.
      with_result: bytes kept with the result wherever that is.
      masks: bytes of random masks, which stay whatever runs again.
      shared: a key and the bytes of an array that layers of one key have in common: it is kept for each layer where the
        keys of a model differ.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    instead: int = 0
    bytes: int = 0
    with_result: int = 0
    masks: int = 0
    shared: tuple[Any, int] | None = None


class Workspace(NamedTuple):
    """Bytes that a door needs at once besides its operands and results.

    Attributes:
      forward, backward: where there are any, they are more than all else in its layer.
      keeping: those of the forward pass where all is kept that the backward pass reads, and of that backward pass.
      beside: in each pass, beside all that is there: arrays that are made again for the backward pass.
      of_passes: in the backward pass of its layer, beside all that is there.
      between_kernels: in the door's own forward pass, and in its backward pass, beside all that is there.
    """

    forward: int = 0
    backward: int = 0
    keeping: tuple[int, int] = (0, 0)
    beside: int = 0
    of_passes: int = 0
    between_kernels: tuple[int, int] = (0, 0)


class LossWorkspace(NamedTuple):
    """Memory of a loss in training.

    Attributes:
      logits: bytes of those that are there at once, without their gradient.
      gradient: bytes of that in an array.
      is_array: whether it is one; otherwise the products that read it compute it from the logits, but for one of a
        table that is gathered and trains.
      gradients: bytes of the gradients that are made with them, of the operands in the forward pass; 0 where they come
        after it.
      table_sum: bytes of the float32 sum of the table's gradient, where it trains and is made so.
      padded_table: bytes of a padded table, where it has no copy in this dtype that could be padded.
      waits: the array, or else the logits, waits for the table's gradient, which comes after the layers.
    """

    logits: int
    gradient: int
    is_array: bool = True
    gradients: int = 0
    table_sum: int = 0
    padded_table: int = 0
    waits: bool = False


class Statistics(NamedTuple):
    """A float32 sum or maximum over the devices that share some dimensions of an operand; nothing where none do.

    Attributes:
      operand, dimensions: which.
      bytes: of one.
      of: its name in reports.
      times: so many in a pass.
      every_pass: also in the backward pass, and where the door runs again; those of a layer are then sent together.
    """

    operand: int
    dimensions: range
    bytes: int
    of: str
    times: int = 1
    every_pass: bool = False


class Exchange(NamedTuple):
    """Collectives over the devices that have parts of an operand which a door reads whole.

    Attributes:
      operand, axes: which operand, and the logical axes by which its dimensions lie before.
      bytes: of one on one device, of the larger side.
      forward, backward: runs in each pass.
      is_hidden: the door computes meanwhile what does not depend on it.
      of: the name of the operand in reports.
      among: the logical axis of which the devices have parts, where these exchange something; None: what `axes` say.
    """

    operand: int
    axes: Axes
    kind: Literal["all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
    bytes: int
    forward: int = 0
    backward: int = 0
    is_hidden: bool = False
    of: str = "keys"
    among: str | None = None


class InPlace(NamedTuple):
    """The directions in which a result takes the place of what the door reads."""

    forward: bool = False
    backward: bool = False


class DoorCost(NamedTuple):
    """The cost of one use of a door on one device.

    Attributes:
      products: matrix products of the forward pass; their gradients follow.
      kernel: computes all products, if one does.
      passes: work element by element, of XLA or of kernels.
      traced: functions that compute, with products of activations among the rest.
      saved: what the backward pass reads.
      workspace, loss: memory that is needed at once.
      in_place: where XLA computes so.
      contracted: an operand and its dimensions that are summed over: the result is a sum over the devices that share
        them.
      contracted_rows: the logical axes by which the parts of that sum lie.
      statistics: sums over devices that do not follow from axes.
      relays: the result is the operand, laid out by other axes; the same buffer where these lie as the first.
      hands_on: the first result has rows of the first operand: its gradients are summed as those of the operand are.
      exchanges: the collectives of operands that are sharded more before the door than in it.
      gathers: the door gathers its parameters, and scatters the sums of their gradients, in a function of its own.
      sums_gradients: the gradient of the first operand is summed over devices whole, and not scattered.
      counts_all_steps: `times` of products and passes cover all the engine's steps of one shape; other doors' `times`
        are of one step.
    """

    products: tuple[DoorProduct, ...] = ()
    kernel: ProductKernel | None = None
    passes: tuple[Pass, ...] = ()
    traced: tuple[Traced, ...] = ()
    saved: Saved = Saved()
    workspace: Workspace = Workspace()
    loss: LossWorkspace | None = None
    in_place: InPlace = InPlace()
    contracted: tuple[int, Sequence[int]] | None = None
    contracted_rows: Axes = GATHERED
    statistics: tuple[Statistics, ...] = ()
    relays: bool = False
    hands_on: bool = False
    exchanges: tuple[Exchange, ...] = ()
    gathers: bool = False
    sums_gradients: bool = False
    counts_all_steps: bool = False

    @property
    def weight_product(self) -> DoorProduct | None:
        """The product with a parameter, if there is one. Raises ValueError for several: each is a door of its own."""
        weighted = [each for each in self.products if each.weight is not None]
        if len(weighted) > 1:
            raise ValueError(f"a door has {len(weighted)} products with parameters; make each a door of its own")
        return weighted[0] if weighted else None


def loop(
    directions: tuple[Loop, Loop], array: LocalArray, scope: str = "", numbers: int | None = None, **options: Any
) -> Pass:
    """Return the forward and backward loops over an array, or over so many numbers of its dtype."""
    count = array.numbers if numbers is None else numbers
    forward, backward = (each.over(count, array.itemsize) for each in directions)
    return Pass(forward, backward, scope, **options)


def launched(costs: KernelCosts, scope: str = "", times: int = 1, kind: PassKind = "pass") -> Pass:
    """Return the passes of a kernel, as it declares them."""
    return Pass(*costs, scope, times, kernel=True, kind=kind)
