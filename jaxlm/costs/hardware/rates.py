"""Look-ups of the rates that programs sustain on a chip. Imports no JAX."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware import catalog
from jaxlm.costs.hardware.chips import Chip, canonical_dtype
from jaxlm.costs.hardware.sustained import (
    AttentionRates,
    CollectiveKind,
    CollectiveRates,
    Curve,
    Direction,
    Library,
    Link,
    LinkShare,
    PassKind,
    Sustained,
    at,
    sustained_rates,
)

# The kernels that stand in for one without rates, in this order: of the same generation, then of the one before.
_STAND_INS = {
    "mosaic_tpu": ("splash",),
    "mosaic_gpu": ("triton", "flash-2", "aiter"),
    "triton": ("flash-2", "aiter"),
    "flash-1-triton": ("flash-1",),
    "flash-2": ("aiter",),
    "flash-3": ("flash-2", "aiter"),
    "cudnn": ("flash-3", "flash-2", "aiter"),
    "flash-4": ("cudnn", "flash-3", "flash-2", "aiter"),
    "trtllm": ("flashinfer", "flash-3", "flash-2", "aiter"),
    "flashinfer": ("trtllm", "flash-3", "flash-2", "aiter"),
    "aiter": ("flash-2",),
}
# Added to a spread where another chip stands in, or another kernel, dtype or kind of pass.
_OTHER_CHIP, _OTHER_KIND = 0.10, 0.05
# FLOP/s by the power to which a chip is capped: the best products of an A100 of 300 W and of one of 400 W are 252.9e12
# and 271.2e12 (github:stas00/ml-engineering@744d01e:compute/accelerator/README.md).
_BY_POWER = math.log(252.9 / 271.2) / math.log(300 / 400)
# Products of the forward and of the backward pass, as shares of those of a step of training.
_FORWARD, _BACKWARD = 1 / 3.5, 2.5 / 3.5


# Doublings of the longest measured length of a causal kernel, after which its rate is that without a mask to a percent.
_DOUBLINGS = 4

# Rates by size, and the half-width of their uncertainty as a share.
_Sized = tuple[Curve, float]


class _Level(NamedTuple):
    """A table that a chip takes rates from. `chip`: whose rates they are; None for shares of any chip's figures."""

    table: Sustained
    chip: Chip | None
    widening: float

    def peak(self, dtype: str) -> float:
        return self.chip.peak(dtype) if self.chip else 1.0

    @property
    def bandwidth(self) -> float:
        return self.chip.figure("memory_bytes_per_s") if self.chip else 1.0


class SustainedRates:
    """The rates that programs sustain on one chip, each with the half-width of its uncertainty as a share.

    What the table of the chip lacks comes from the chip that it is `like`, in proportion to their published peaks or
    bandwidths, and at last from the medians of all measured chips. Rates are per chip.

    `kernel_s`, `eager_s`, `step_s` and `token_s` are those of `Launches`, 0 where none was measured.
    `has_xla_attention`: attention by XLA, without a kernel, was measured as a whole.
    """

    def __init__(self, chip: Chip):
        self._chip = chip
        self._levels = tuple(_levels(chip))
        self.kernel_s, self.eager_s, self.step_s, self.token_s = (
            self._seconds(name) for name in ("kernel_s", "eager_s", "step_s", "token_s")
        )
        self.has_xla_attention = any(entry.kernel == "xla" for entry in self._levels[0].table.attention)
        self._products = functools.cache(self._find_product)
        self._passes = functools.cache(self._find_pass)
        self._attention = functools.cache(self._find_attention)
        self._collectives = functools.cache(self._find_collectives)
        self._links = functools.cache(self._find_link)

    def product(self, dtype: Any, side: float, batch: int = 1) -> tuple[float, float]:
        """Return FLOP/s of a product with this smallest side, or of a batch of them. Raises InputError if the chip has
        no published peak for the dtype."""
        curve, spread = self._products(canonical_dtype(dtype), batch > 1)
        return at(curve, side), spread

    def moving(self, kind: PassKind, size: float) -> tuple[float, float]:
        """Return bytes per second of a pass that moves `size` bytes, of `weights` in a matrix of `size` bytes, or of a
        `cache` of which a layer reads `size` bytes. Raises InputError if the chip has no published bandwidth."""
        curve, spread = self._passes(kind)
        return at(curve, size), spread

    def attention(
        self, kernel: str, direction: Direction, causal: bool, head_dim: int, sequence: float, dtype: Any = "bfloat16"
    ) -> tuple[float, float]:
        """Return FLOP/s of a kernel of attention over the scores that its mask leaves. Raises InputError if the chip
        has no published peak for the dtype."""
        curve, spread = self._attention(kernel, direction, causal, head_dim, canonical_dtype(dtype))
        return at(curve, sequence), spread

    def collective(
        self, kind: CollectiveKind, devices: int, size: float, library: Library = "nccl"
    ) -> CollectiveRates | None:
        """Return the time's constants of a collective of `size` bytes within a domain; None where only shares of the
        link were measured (`link`)."""
        for entry in self._collectives(kind, devices, library):
            if entry.most_bytes is None or size <= entry.most_bytes:
                return entry
        return None

    def link(self, link: Link) -> LinkShare:
        """Return the share of a link's published rate that collectives reach."""
        return self._links(link)

    def capped(self, watts: float | None) -> float:
        """Return the share of FLOP/s that is left at a cap of power; 1 without one."""
        if watts is None or self._chip.watts is None:
            return 1.0
        return min(1.0, (watts / self._chip.watts) ** _BY_POWER)

    def _seconds(self, name: str) -> float:
        entries = (getattr(entry, name) for level in self._levels for entry in level.table.launches)
        return next((seconds for seconds in entries if seconds is not None), 0.0)

    def _find_product(self, dtype: str, batched: bool) -> _Sized:
        peak = self._chip.peak(dtype)
        runs_as = self._chip.float32_as or dtype if dtype == "float32" else dtype
        for level in self._levels:
            entries = sorted(level.table.products, key=lambda entry: entry.batched != batched)
            for wanted in (runs_as, "bfloat16", "float16"):
                if entry := next((each for each in entries if each.dtype == wanted), None):
                    other = _OTHER_KIND * (wanted != runs_as and runs_as not in ("bfloat16", "float16"))
                    spread = entry.spread + level.widening + other
                    return _scaled(entry.rates, peak / level.peak(entry.dtype), spread)
        raise AssertionError("the last level has products in bfloat16")

    def _find_pass(self, kind: PassKind) -> _Sized:
        bandwidth = self._chip.figure("memory_bytes_per_s")
        for wanted in (kind, "pass"):
            for level in self._levels:
                if entry := next((each for each in level.table.passes if each.kind == wanted), None):
                    spread = entry.spread + level.widening + _OTHER_KIND * (wanted != kind)
                    curve, _ = _scaled(entry.rates, bandwidth / level.bandwidth, spread)
                    if level is not self._levels[0]:  # passes faster than the memory are in that chip's cache
                        curve = tuple((size, min(rate, bandwidth)) for size, rate in curve)
                    return curve, spread
        raise AssertionError("the last level has passes")

    def _find_attention(self, kernel: str, direction: Direction, causal: bool, head_dim: int, dtype: str) -> _Sized:
        peak = self._chip.peak(dtype)
        *levels, last = self._levels
        tries = [(each, level) for each in (kernel, *_STAND_INS.get(kernel, ())) for level in levels]
        for wanted, level in (*tries, (last.table.attention[0].kernel, last)):
            entries = [each for each in level.table.attention if each.kernel == wanted]
            causal_curves = dict(_by_head_dim((each for each in entries if each.mask == "causal"), direction))
            full_curves = dict(_by_head_dim((each for each in entries if each.mask == "full"), direction))
            if curves := causal_curves if causal else full_curves:
                curve, spread = _between(curves, head_dim)
                if causal and full_curves:
                    curve = _lengthened(curve, _between(full_curves, head_dim)[0])
                spread += level.widening + _OTHER_KIND * (wanted != kernel)
                return _scaled(curve, peak / level.peak(entries[0].dtype), spread)
        raise AssertionError("the last level has attention")

    def _find_collectives(self, kind: CollectiveKind, devices: int, library: Library) -> tuple[CollectiveRates, ...]:
        """Return the rates of a collective by ascending size of its message; NCCL's where a library has none."""
        for level in self._levels:
            entries = [e for e in level.table.collectives if (e.kind, e.link) == (kind, "domain")]
            entries = [e for e in entries if e.library in (library, "nccl")]
            if entries:
                sizes = {entry.devices for entry in entries}
                size = max((size for size in sizes if size <= devices), default=min(sizes))
                measured = [self._over_link(entry, level) for entry in entries if entry.devices == size]
                return tuple(sorted(measured, key=lambda e: (e.most_bytes or math.inf, e.library == "nccl")))
            if any(entry.link == "domain" for entry in level.table.links):
                break
        return ()

    def _over_link(self, entry: CollectiveRates, level: _Level) -> CollectiveRates:
        rates = [chip.link.bytes_per_s for chip in (self._chip, level.chip) if chip and chip.link]
        scale = rates[0] / rates[1] if len(rates) == 2 and all(rates) else 1.0
        changes = {"bus_bytes_per_s": scale * entry.bus_bytes_per_s, "spread": entry.spread + level.widening}
        return entry.model_copy(update=changes)

    def _find_link(self, link: Link) -> LinkShare:
        for level in self._levels:
            if entry := next((each for each in level.table.links if each.link == link), None):
                return entry.model_copy(update={"spread": entry.spread + level.widening})
        raise AssertionError("the last level has links")


_rates: dict[int, tuple[Chip, SustainedRates]] = {}  # by the identity of their chip, which is kept


def sustained(chip: Chip) -> SustainedRates:
    """Return the rates that programs sustain on a chip. Raises InputError where the chip that it is like is unknown,
    or like itself."""
    if id(chip) not in _rates:
        if len(_rates) >= 256:
            _rates.clear()
        _rates[id(chip)] = chip, SustainedRates(chip)
    return _rates[id(chip)][1]


def _levels(chip: Chip) -> Iterator[_Level]:
    """Yield the tables that a chip takes rates from, its own first. A chip with other figures than the catalog's of
    this id takes them in proportion."""
    published = catalog.catalog().get(chip.id, chip)
    yield _Level(published.sustained, published, 0.0)
    chain = [published.id]
    while published.sustained.like:
        published = catalog.find(published.sustained.like)
        if published.id in chain:
            raise InputError(f"sustained rates of {chip.id}: {' is like '.join([*chain, published.id])}")
        chain.append(published.id)
        yield _Level(published.sustained, published, _OTHER_CHIP * (len(chain) - 1))
    yield _Level(sustained_rates()["generic-gpu" if chip.kind == "gpu" else "generic"], None, 0.0)


def _by_head_dim(entries: Iterable[AttentionRates], direction: Direction) -> Iterator[tuple[int, _Sized]]:
    """Yield (head_dim, (rates, spread)) of a kernel in one direction, which may follow from the two others: training
    takes the time of both passes."""
    measured = {(entry.head_dim, entry.direction): entry for entry in entries}
    for head_dim in sorted({head_dim for head_dim, _ in measured}):
        if entry := measured.get((head_dim, direction)):
            yield head_dim, (entry.rates, entry.spread)
            continue
        of = {name: measured.get((head_dim, name)) for name in ("forward", "backward", "training")}
        forward, backward, training = of["forward"], of["backward"], of["training"]
        if direction == "training" and forward and backward:
            yield head_dim, _combined(forward, backward, lambda f, b: 1 / (_FORWARD / f + _BACKWARD / b))
        elif direction == "backward" and training and forward:
            yield head_dim, _combined(training, forward, lambda t, f: _BACKWARD / (1 / t - _FORWARD / f))
        elif direction == "forward" and training and backward:
            yield head_dim, _combined(training, backward, lambda t, b: _FORWARD / (1 / t - _BACKWARD / b))


def _scaled(curve: Curve, scale: float, spread: float) -> _Sized:
    return tuple((size, scale * rate) for size, rate in curve), spread


def _combined(one: AttentionRates, two: AttentionRates, rate: Callable[[float, float], float]) -> _Sized:
    sizes = _sizes(one.rates, two.rates)
    return tuple((size, rate(at(one.rates, size), at(two.rates, size))) for size in sizes), max(one.spread, two.spread)


def _between(curves: dict[int, _Sized], head_dim: int) -> _Sized:
    """Return the rates at a head dimension: on a logarithmic scale between two that were measured, in proportion below
    the smallest, whose tiles it fills in part."""
    widths = sorted(curves)
    if head_dim <= widths[0]:
        curve, spread = curves[widths[0]]
        return _scaled(curve, head_dim / widths[0], spread)
    if head_dim >= widths[-1]:
        return curves[widths[-1]]
    narrow, wide = next(pair for pair in itertools.pairwise(widths) if head_dim <= pair[1])
    part = math.log(head_dim / narrow) / math.log(wide / narrow)
    (low, one), (high, two) = curves[narrow], curves[wide]
    return tuple((s, (1 - part) * at(low, s) + part * at(high, s)) for s in _sizes(low, high)), max(one, two)


def _lengthened(causal: Curve, full: Curve) -> Curve:
    """Return causal rates at lengths beyond the longest measured one too.

    A mask leaves half of each tile on the diagonal unused: what a causal kernel loses to one without a mask is a share
    of its time that halves when the length doubles.
    """
    last, rate = causal[-1]
    loss = max(0.0, at(full, last) / rate - 1)
    longer = tuple((last * 2**n, rate * (1 + loss) / (1 + loss / 2**n)) for n in range(1, _DOUBLINGS + 1))
    return causal + longer


def _sizes(one: Curve, two: Curve) -> list[float]:
    """Return the sizes at which either curve was measured, ascending."""
    return sorted({size for curve in (one, two) for size, _ in curve})
