"""Seconds of the operations of a step on one device, one after the other, at sustained rates."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from jaxlm.costs.counted import operations
from jaxlm.costs.counted.operations import Operation
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.rates import SustainedRates
from jaxlm.costs.stack import Stack
from jaxlm.costs.workload import Workload
from jaxlm.models.doors.cost import Product

# Output tiles that one core of a GPU computes at once: 128 × 256, the largest of CUTLASS's usual ones.
_TILE = 128, 256

# Products of so few rows read a matrix as decoding does; the rates of `weights` were measured with up to 16.
_FEW_ROWS = 64
# Products that the rate of a backward kernel of attention counts (`AttentionRates`), for each of the four gradients.
_RATED_PRODUCTS = 5 / 4
# The least share of a chip's bandwidth at which anything is read (sustained.toml, matrices of a megabyte).
_LEAST_SHARE = 0.02
# The passes that a framework without fusion runs as kernels of their own.
_EAGER_KERNELS = ("norm", "rms_norm", "activation", "gated", "rope", "add")

# What an operation's time is counted as.
PartName = Literal["products", "attention", "passes", "recomputation", "optimizer", "copies", "draws", "launches"]


class Part(NamedTuple):
    """Seconds of a part of a step. `ideal`: of the same work at published rates; 0 for work that the napkin leaves out.
    `spread`: the half-width of the uncertainty, in seconds."""

    seconds: float = 0.0
    ideal: float = 0.0
    spread: float = 0.0

    def __add__(self, other: "Part") -> "Part":
        return Part(self.seconds + other.seconds, self.ideal + other.ideal, self.spread + other.spread)

    def times(self, factor: float) -> "Part":
        """Return the part of `factor` such works."""
        return Part(factor * self.seconds, factor * self.ideal, factor * self.spread)


class Computation(NamedTuple):
    """The operations of a step on one device: seconds by part, seconds by phase (forward, or backward with what it
    recomputes), and the number of kernels that they start. Part `launches`: of kernels shorter than the shortest."""

    parts: dict[str, Part]
    phases: dict[str, float]
    kernels: int


def computation(
    ops: Iterable[Operation], work: Workload, chip: Chip, rates: SustainedRates, stack: Stack
) -> Computation:
    """Return the time of a step's operations under a stack, each at the rate that kernels of its size sustain.

    A product takes the longer of its FLOPs at the rate of its smallest side and its traffic; on a GPU at least whole
    waves of output tiles, on a TPU whole tiles of the matrix unit. Attention takes its visible scores at the rate of
    its kernel. A pass takes the bytes that it moves. No operation is shorter than the shortest kernel.
    """
    clock = _Clock(work, chip, rates, stack)
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    phases: dict[str, float] = defaultdict(float)
    kernels, launches, shortest = 0, 0.0, rates.kernel_s
    for op, flops in by_kernel(op for op in ops if not (_is_scored_again(op) or _is_of_pass(op))):
        times, part = op.times, parts[_name(op)]
        seconds, ideal, spread = clock.once(op, flops)
        part[0] += times * seconds
        part[1] += times * ideal
        part[2] += times * spread
        kernels += times
        if seconds < shortest:
            launches += times * (shortest - seconds)
        if op.phase != "optimizer":
            phases["forward" if op.phase == "forward" else "backward"] += times * max(seconds, shortest)
    named = {name: Part(*sums) for name, sums in parts.items()}
    if launches:
        named["launches"] = Part(launches, 0.0, launches / 2)
    return Computation(named, phases, kernels)


def by_kernel(ops: Iterable[Operation]) -> Iterator[tuple[Operation, float]]:
    """Yield each operation with its least FLOPs; of a kernel of several products the first, which has the traffic of
    all, with the least FLOPs of all."""
    first, flops = None, 0.0
    for op in ops:
        if op.kernel and op.product and not op.least_bytes and first is not None and op.kernel == first.kernel:
            flops += op.least_flops
            continue
        if first is not None:
            yield first, flops
        first, flops = op, op.least_flops
    if first is not None:
        yield first, flops


def as_run(ops: list[Operation], work: Workload, stack: Stack) -> list[Operation]:
    """Return the operations of a step, which are `ops` under jaxlm, as a stack runs them."""
    if stack.attention == "unfused":
        return operations.step(work.without_kernels())
    if stack.passes == "fused" and stack.attention is None:
        return ops
    flash = work.with_execution(kernels="auto")
    rest = work.without_kernels() if stack.passes == "eager" else flash
    attention = [op for op in operations.step(flash) if _is_attention(op)]
    return attention + [op for op in operations.step(rest) if not _is_attention(op) and op.kind != "scores"]


def _is_attention(op: Operation) -> bool:
    is_kernel = bool(op.kernel) and op.kind != "weights"
    return op.product is not None and (op.visible is not None or (is_kernel and op.groups is None))


def _is_scored_again(op: Operation) -> bool:
    """Return whether a backward kernel of attention computes this product again. Its rate counts one such product,
    whatever the kernel does: `_Clock` adds it to the gradients."""
    return bool(op.kernel) and op.kernel.direction == "backward" and op.phase == "rematerialised"


def _is_of_pass(op: Operation) -> bool:
    """Return whether a product, with a vector and without traffic of its own, is computed by the pass that moves its
    operands, as the reads of a state by one token are."""
    is_with_vector = op.product is not None and 1 in (op.product.m, op.product.n)
    return is_with_vector and not (op.kernel or op.least_bytes or op.most_bytes)


def _name(op: Operation) -> PartName:
    if op.kind == "copy":
        return "copies"
    if op.kind == "draw":
        return "draws"
    if op.phase == "optimizer":
        return "optimizer"
    if op.phase == "rematerialised":
        return "recomputation"
    if op.product is None:
        return "passes"
    return "attention" if _is_attention(op) else "products"


def product_dtype(op: Operation, work: Workload, chip: Chip, stack: Stack) -> str:
    """Return the dtype whose rate a product has: its own or, of products with weights, the stack's, on a chip on which
    that is faster than the step's."""
    if op.phase == "optimizer":
        return "float32"
    own = stack.precision if op.dtype is None and stack.precision != "int4" and _has_weights(op) else op.dtype
    return own if own in chip.peak_flops and chip.peak(own) > chip.peak(work.dtype) else work.dtype


def least_moved(op: Operation, work: Workload, stack: Stack) -> float:
    """Return the least bytes that an operation moves; in inference, weights and an engine's cache are as narrow as the
    stack has them."""
    if work.kind == "train" or op.product is None:
        return op.least_bytes
    if _has_weights(op):
        batch, m, k, n = op.product
        weights = batch * k * n * work.itemsize
        if op.groups is not None:  # those of the groups that have rows
            weights = op.least_bytes - batch * m * (k + n) * work.itemsize
        return op.least_bytes - weights * (1 - stack.weight_bytes(work.itemsize) / work.itemsize)
    return op.least_bytes * stack.cache_share(work.itemsize)


def _has_weights(op: Operation) -> bool:
    return op.visible is None and (not op.kernel or op.groups is not None) and op.kind != "scores"


class _Clock:
    """The rates of one device for one workload."""

    def __init__(self, work: Workload, chip: Chip, rates: SustainedRates, stack: Stack):
        self._work, self._chip, self._rates, self._stack = work, chip, rates, stack
        self._share = 1 / chip.devices_per_chip
        self._bandwidth = self._share * chip.memory_bytes_per_s
        self._power = rates.capped(stack.watts)
        of_engine = "cache" if stack.pages else "weights"
        self._kind_of_cache = "pass" if work.kind == "train" else of_engine
        self._by_xla = rates.has_xla_attention and work.kind == "train"
        self._peaks: dict[str, float] = {}
        self._largest: dict[tuple[str, bool], float] = {}  # the rates of large products
        self._of_products: dict[tuple, tuple[float, float, float]] = {}

    def once(self, op: Operation, flops: float) -> tuple[float, float, float]:
        """Return the seconds of one run of an operation, its ideal and its spread, as of a `Part`. `flops`: of all
        products of its kernel."""
        if self._by_xla and not op.kernel and (op.kind == "scores" or op.visible is not None):
            return self._attention_by_xla(op)
        if op.product is None:
            return self._pass(op)
        if _is_attention(op) and op.kernel:
            return self._attention(op, flops)
        key = op.product, op.phase, op.least_bytes, op.most_bytes, op.visible is None, op.groups, op.dtype
        if key not in self._of_products:  # many products of a layer have the same sizes
            self._of_products[key] = self._product(op)
        return self._of_products[key]

    def _peak(self, dtype: str) -> float:
        if dtype not in self._peaks:
            self._peaks[dtype] = self._share * self._chip.peak(dtype)
        return self._peaks[dtype]

    def _pass(self, op: Operation) -> tuple[float, float, float]:
        if op.phase == "optimizer":
            moved, kind = op.least_bytes, "optimizer"
        else:
            moved, is_eager = op.most_bytes, self._stack.passes == "eager"
            kind = op.kind if is_eager and op.kind in _EAGER_KERNELS else "pass"
            if is_eager and op.kind == "bias":  # products add it; its gradient is a sum, which only reads
                moved = moved / 2 if op.phase == "backward" else 0
        rate, spread = self._rates.moving(kind, max(moved, 1))
        seconds = moved / (self._share * rate)
        return seconds, 0.0, spread * seconds

    def _product(self, op: Operation) -> tuple[float, float, float]:
        product, moved = op.product, max(least_moved(op, self._work, self._stack), 1)
        if op.groups is not None:
            product = op.groups.each(product)
        batch, m, k, n = product
        dtype = product_dtype(op, self._work, self._chip, self._stack)
        rate, spread = self._rates.product(dtype, min(m, k, n), batch)
        if dtype == self._stack.precision:  # few rows may be faster in the step's own dtype, with narrow weights
            rate, spread = max((rate, spread), self._rates.product(self._work.dtype, min(m, k, n), batch))
        rate *= self._share * self._power
        seconds = max(_in_tiles(product, self._chip) / rate, self._waves(product, dtype))
        if moved > _LEAST_SHARE * self._bandwidth * seconds:  # otherwise no rate makes its traffic take longer
            kind = "weights" if min(m, k, n) <= _FEW_ROWS else "pass"
            bandwidth, of_memory = self._rates.moving(kind, moved)
            if (reading := moved / (self._share * bandwidth)) > seconds:
                seconds, spread = reading, of_memory
        if op.visible is not None:  # its scores go through memory
            seconds = max(seconds, op.most_bytes / (self._share * self._rates.moving("pass", max(op.most_bytes, 1))[0]))
        is_extra = op.phase in ("rematerialised", "optimizer")
        ideal = 0.0 if is_extra else max(product.flops / self._peak(dtype), moved / self._bandwidth)
        return seconds, ideal, spread * seconds

    def _waves(self, product: Product, dtype: str) -> float:
        """Return the seconds of whole waves of output tiles over the cores of a GPU, at the rate of large products."""
        chip = self._chip
        if chip.kind != "gpu" or chip.on_chip is None:
            return 0.0
        batch, m, k, n = product
        tiles, cores = batch * math.ceil(m / _TILE[0]) * math.ceil(n / _TILE[1]), chip.on_chip.cores
        if tiles <= cores:  # the smallest side decides
            return 0.0
        if (key := (dtype, batch > 1)) not in self._largest:
            self._largest[key], _ = self._rates.product(dtype, math.inf, batch)
        rate = self._largest[key]
        flops = math.ceil(tiles / cores) * cores * 2 * _TILE[0] * _TILE[1] * k
        return flops / (rate * self._share * self._power)

    def _attention(self, op: Operation, flops: float) -> tuple[float, float, float]:
        """Return the time of a kernel of attention: of its products, or of its traffic if that takes longer."""
        work, kernel = self._work, op.kernel
        # The head dim is the smallest size; an engine's kernel may have fewer rows than that.
        head_dim = min(op.product[1:] if work.kind == "train" else op.product[2:])
        name = self._stack.attention or kernel.name
        sequence = work.sequence * min(1.0, 2 * float(op.visible.causal)) if op.visible else work.sequence
        rate, spread = self._rates.attention(name, kernel.direction, True, head_dim, max(sequence, 1), work.dtype)
        rated = flops * (_RATED_PRODUCTS if kernel.direction == "backward" else 1)
        seconds = rated / (self._share * rate * self._power)
        moved = least_moved(op, work, self._stack)
        bandwidth, of_memory = self._rates.moving(self._kind_of_cache, max(moved, 1))
        if (reading := moved / (self._share * bandwidth)) > seconds:
            seconds, spread = reading, of_memory
        is_extra = op.phase == "rematerialised"
        ideal = 0.0 if is_extra else max(flops / self._peak(work.dtype), moved / self._bandwidth)
        return seconds, ideal, spread * seconds

    def _attention_by_xla(self, op: Operation) -> tuple[float, float, float]:
        """Return the time of a product of attention, which includes its share of the passes over scores: their rate was
        measured together, over the products that XLA computes."""
        if op.product is None:
            return 0.0, 0.0, 0.0
        work, width = self._work, min(op.product[1:])
        rate, spread = self._rates.attention("xla", "training", True, width, work.sequence, work.dtype)
        seconds = op.flops / (self._share * rate)
        ideal = 0.0 if op.phase == "rematerialised" else op.flops / self._peak(work.dtype)
        return seconds, ideal, spread * seconds


def _in_tiles(product: Product, chip: Chip) -> int:
    """Return the FLOPs of a product whose sizes are padded to whole tiles of a TPU's matrix unit; a GPU's measured
    rates include its padding."""
    if chip.kind == "gpu" or chip.on_chip is None or chip.on_chip.matrix_tile is None:
        return product.flops
    batch, *sizes = product
    padded = (math.ceil(size / tile) * tile for size, tile in zip(sizes, chip.on_chip.matrix_tile, strict=True))
    return Product(batch, *padded).flops
