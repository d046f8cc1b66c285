"""Sustained rates of a chip: what programs reach of its peaks, by published microbenchmarks and our own measurements.

`sustained.toml` holds them, each with its source. Nothing in it was fitted to a step of training or of decoding: whole
runs judge the estimate (`jaxlm plan --check`). Rates are per chip, in SI units. A curve gives rates at ascending sizes;
between two sizes the rate is interpolated on a logarithmic scale, and beyond the ends it is that of the end; a causal
kernel of attention comes closer to its rate without a mask.
"""

import functools
import itertools
import math
import tomllib
from importlib import resources
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator

from jaxlm.core.errors import InputError
from jaxlm.core.explain import first_line
from jaxlm.core.schema import Section

# (size, rate), ascending by size.
Curve = tuple[tuple[PositiveFloat, PositiveFloat], ...]

# Kinds of passes over memory: `pass` between products (norms, activations, residuals), fused as XLA and compiled
# frameworks fuse them; `norm` (LayerNorm), `rms_norm`, `activation` (alone), `gated` (times another product), `rope`
# and `add` as kernels of eager frameworks run one by one; `optimizer` the fused update; `weights` a matrix read for few
# rows, by the bytes of the matrix; `cache` keys and values read by decoding, by the bytes that one layer reads.
PassKind = Literal["pass", "norm", "rms_norm", "activation", "gated", "rope", "add", "optimizer", "weights", "cache"]
CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
Direction = Literal["forward", "backward", "training"]
Library = Literal["nccl", "custom"]
Link = Literal["domain", "network"]


class _Measured(Section):
    """A measured rate.

    `source`: its address, or its name in the file's [sources]. `spread`: the half-width of its uncertainty, as a share.
    `derived`: how it follows from a measurement of another chip or case, if it does.
    """

    source: str
    spread: NonNegativeFloat = 0.1
    derived: str = ""


class ProductRates(_Measured):
    """FLOP/s of products by the smallest side. `batched`: of many small products at once, as of attention's heads.
    `jaxlm hardware --measure` measures a product together with both its gradients."""

    dtype: str
    rates: Curve
    batched: bool = False


class PassRates(_Measured):
    """Bytes per second of a kind of pass, by the bytes that one pass moves as the doors declare it."""

    kind: PassKind
    rates: Curve


class AttentionRates(_Measured):
    """FLOP/s of an attention kernel by sequence length. Only scores that the mask leaves are counted, twice the
    products of the forward pass and five of the backward pass (2.5 times the forward FLOPs).

    Kernel "xla": attention by XLA, as `jaxlm hardware --measure` measures it with its softmax and transposes; the
    products that XLA computes are counted, four of them in the backward pass."""

    kernel: str
    direction: Direction
    mask: Literal["causal", "full"]
    head_dim: PositiveInt
    dtype: str = "bfloat16"
    rates: Curve


class CollectiveRates(_Measured):
    """The time of a collective of V bytes over n devices: max(floor_s, f(n) · (V + half_bytes) / bus_bytes_per_s), with
    f(n) = (n − 1) / n, twice that for an all-reduce (the bus bandwidth of nccl-tests).

    V: the result of an all-gather, the operand of the others. `link`: within a domain, or over the network between
    domains. `devices`: the size that was measured. `most_bytes`: the entry serves messages up to this size. `library`:
    "custom" is a serving engine's own kernel.
    """

    kind: CollectiveKind
    link: Link = "domain"
    devices: PositiveInt
    floor_s: PositiveFloat
    half_bytes: NonNegativeFloat
    bus_bytes_per_s: PositiveFloat
    most_bytes: PositiveFloat | None = None
    library: Library = "nccl"


class LinkShare(_Measured):
    """The share of a link's published rate that collectives reach, and the message at which they reach half of that.

    It serves chips whose collectives were not measured one by one: TPUs, and the network between domains.
    """

    link: Link = "domain"
    share: PositiveFloat
    half_bytes: NonNegativeFloat


class Launches(_Measured):
    """Seconds that start something. `kernel_s`: the shortest kernel in a captured graph or compiled program.
    `eager_s`: the host's time for each operation that a framework starts one by one. `step_s`: the host's time for a
    program. `token_s`: the host's time of a serving engine for each step of decoding."""

    kernel_s: NonNegativeFloat | None = None
    eager_s: NonNegativeFloat | None = None
    step_s: NonNegativeFloat | None = None
    token_s: NonNegativeFloat | None = None


class Sustained(Section):
    """The sustained rates of a chip. `like`: the chip whose shares of its peaks stand in for what was not measured."""

    like: str | None = None
    products: tuple[ProductRates, ...] = ()
    passes: tuple[PassRates, ...] = ()
    attention: tuple[AttentionRates, ...] = ()
    collectives: tuple[CollectiveRates, ...] = ()
    links: tuple[LinkShare, ...] = ()
    launches: tuple[Launches, ...] = ()

    @model_validator(mode="after")
    def _ascending(self):
        for each in (*self.products, *self.passes, *self.attention):
            sizes = [size for size, _ in each.rates]
            if not sizes or sizes != sorted(set(sizes)):
                raise ValueError(f"the sizes of a curve ascend, not {sizes}")
        return self


def at(curve: Curve, size: float) -> float:
    """Return the rate of a curve at a size."""
    for (low, slow), (high, fast) in itertools.pairwise(curve):
        if size <= high:
            return slow + (fast - slow) * max(0.0, math.log(size / low) / math.log(high / low))
    return curve[-1][1]


def attention_kernels() -> list[str]:
    """Return the names of the attention kernels that have rates on some chip."""
    return sorted({each.kernel for rates in sustained_rates().values() for each in rates.attention})


@functools.cache
def sustained_rates() -> dict[str, Sustained]:
    """Return the rates of `sustained.toml` by the id of their chip. Raises InputError for a broken file."""
    tables = tomllib.loads((resources.files("jaxlm.costs.hardware") / "sustained.toml").read_text(encoding="utf-8"))
    addresses = tables.pop("sources")
    rates = {}
    for id, values in tables.items():
        for entry in itertools.chain.from_iterable(each for each in values.values() if isinstance(each, list)):
            entry["source"] = addresses.get(entry.get("source"), entry.get("source"))
        try:
            rates[id] = Sustained.model_validate(values)
        except ValidationError as error:
            raise InputError(f"sustained.toml, [{id}] {first_line(error)}") from None
    return rates
