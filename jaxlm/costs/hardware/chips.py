"""Figures of a chip: peaks, memories, links. Units are SI: FLOP/s, bytes, bytes/s, seconds, W, USD.

A chip is what is sold; a device is what JAX shards over (`devices_per_chip`). An unpublished figure is None, and
`Chip.figure` reports that in one line.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from jaxlm.core.errors import InputError
from jaxlm.core.schema import Section

# The names of dtypes under which peaks are listed; all formats of one width share a name.
DTYPES = ("bfloat16", "float16", "tf32", "float32", "float8", "float6", "float4", "int8", "int4")
_SHORT = {"bf": "bfloat", "fp": "float", "f": "float", "i": "int", "s": "int"}


def canonical_dtype(dtype: Any) -> str:
    """Return the name under which a chip lists the peak of a dtype. "bf16", "bfloat16" and a NumPy dtype give the same
    name, and so do "fp8", "float8_e4m3fn" and "float8_e5m2". Raises InputError for a name that has no peak."""
    return _canonical(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype))


@functools.cache
def _canonical(spelling: str) -> str:
    name = re.sub(r"^(mx|nv)(?=fp)", "", spelling.strip().lower())
    if name in ("tensorfloat32", "tf32"):
        return "tf32"
    if parts := re.fullmatch(r"(bfloat|float|int|bf|fp|f|i|s)(\d+)(_?e\d+m\d+\w*)?", name):
        kind, bits, _ = parts.groups()
        name = _SHORT.get(kind, kind) + bits
    if name not in DTYPES:
        raise InputError(f"{spelling!r} is no type with a peak; the types are {', '.join(DTYPES)}")
    return name


# (side of a product, FLOP/s), ascending by side.
Rates = tuple[tuple[PositiveInt, PositiveFloat], ...]


class OnChip(Section):
    """Cores, on-chip memories and matrix units.

    `core` is the vendor's word for what `cores` counts: SM, TensorCore, CU. Per core: `registers_bytes`;
    `scratchpad_bytes`, the fastest memory that programs address (shared memory with L1, VMEM, LDS, SBUF), of which one
    block of a kernel may use `block_scratchpad_bytes`; `tensor_memory_bytes`, which feeds only matrix units. Per chip:
    `shared_bytes`, addressed by all cores (CMEM, Gaudi's SRAM); the caches `l2_bytes` and `l3_bytes`; `matrix_units`;
    all bandwidths. `matrix_tile` is [M, N, K] of the largest bfloat16 product that one matrix unit executes as one
    instruction, or as one step of a systolic array: other sizes are padded to its multiples. `clock_hz` is the maximum.
    """

    core: str
    cores: PositiveInt
    clock_hz: PositiveFloat | None = None
    registers_bytes: PositiveInt | None = None
    scratchpad_bytes: PositiveInt | None = None
    scratchpad_bytes_per_s: PositiveFloat | None = None
    block_scratchpad_bytes: PositiveInt | None = None
    tensor_memory_bytes: PositiveInt | None = None
    shared_bytes: PositiveInt | None = None
    shared_bytes_per_s: PositiveFloat | None = None
    l2_bytes: PositiveInt | None = None
    l2_bytes_per_s: PositiveFloat | None = None
    l3_bytes: PositiveInt | None = None
    matrix_units: PositiveInt | None = None
    matrix_tile: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None


class Link(Section):
    """The interconnect of chips in one scale-up domain. All rates are one-way: a chip may receive as much as it sends.

    `bytes_per_s` leaves a chip over all of its `links`, `link_bytes_per_s` over one link. `topology`: through a
    "switch" every chip reaches every other at the full rate; in a "mesh" each pair has its own links; a "ring" or torus
    joins neighbours; "host" is the PCIe of the machine. `domain`: the maximum number of joined chips (node, NVLink
    domain or pod); None if it is not published. `wraparound`: the ends of an axis are joined if its length is a
    multiple of this; in a 3-D torus only if that holds for every axis, because the optical switches join whole cubes
    (scaling-book, tpus.md). `latency_s` is the latency of one hop.
    """

    kind: str
    topology: Literal["switch", "mesh", "ring", "torus2d", "torus3d", "host"]
    domain: PositiveInt | None = None
    links: PositiveInt | None = None
    link_bytes_per_s: PositiveFloat | None = None
    bytes_per_s: PositiveFloat | None = None
    latency_s: PositiveFloat | None = None
    wraparound: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _all_links_together(cls, values):
        if isinstance(values, dict) and values.get("links") and values.get("link_bytes_per_s"):
            return {"bytes_per_s": values["links"] * values["link_bytes_per_s"], **values}
        return values

    @property
    def axes(self) -> int:
        """The number of axes of the torus; 0 for other topologies."""
        return {"torus2d": 2, "torus3d": 3}.get(self.topology, 0)

    def wraps(self, topology: tuple[int, ...]) -> tuple[bool, ...]:
        """Return, for each axis of a slice, whether its two ends are joined."""
        if not self.wraparound:
            return (False,) * len(topology)
        joined = tuple(size % self.wraparound == 0 for size in topology)
        return (all(joined),) * len(joined) if self.topology == "torus3d" else joined


class KernelRates(Section):
    """The rates that kernels reach on one chip, as measured: FLOP/s of a large product by its type, and the bytes per
    second that a copy reads and writes."""

    product_flops: dict[Literal[DTYPES], PositiveFloat]
    copy_bytes_per_s: PositiveFloat


class Chip(Section):
    """One chip.

    `aliases` are other names for its `id`, such as "h100" for the SXM part. `memory_bytes` is the nominal memory of the
    chip; `device_memory_bytes` is what a compiler lets a program use on one device. `host_bytes_per_s` (PCIe) and
    `scale_out_bytes_per_s` (network) are one-way and per chip. `usd_per_hour` is the range of prices of one chip.

    Measured, not published, are: `dispatch_s`, the time of an empty compiled call; `elementwise_flops`, float32 results
    per second of elementwise operations, exponentials among them; `product_rates` and, for the heads of attention,
    `batched_rates`, FLOP/s in a training step of a product and both its gradients by the smallest side;
    `pass_bytes_per_s`, bytes read and written by the slowest kind of pass between products (heads transposed, rows
    reduced, arrays added); and `kernel_rates`.

    `float32_as` is the type in which XLA multiplies float32 at its default precision: TF32 on NVIDIA's chips since
    Ampere, one bfloat16 pass on a TPU; None is float32 itself. `device_kinds` are JAX's names of its devices; NVIDIA's
    have a `compute_capability`. `slices` are a TPU's legal slices except those made of whole cubes (`legal_slices`).
    `sources` maps each source to the figures that it backs, with dots; "recalled" means from memory, without a source.
    `notes` says where sources disagree.
    """

    id: str
    aliases: tuple[str, ...] = ()
    name: str
    vendor: str
    kind: Literal["gpu", "tpu", "asic", "apple", "cpu"]
    peak_flops: dict[Literal[DTYPES], PositiveFloat] = Field(default_factory=dict)
    float32_as: Literal["tf32", "bfloat16"] | None = None
    memory_bytes: PositiveInt
    device_memory_bytes: PositiveInt | None = None
    memory_bytes_per_s: PositiveFloat
    on_chip: OnChip | None = None
    link: Link | None = None
    host_bytes_per_s: PositiveFloat | None = None
    scale_out_bytes_per_s: PositiveFloat | None = None
    watts: PositiveFloat | None = None
    usd_per_hour: tuple[PositiveFloat, PositiveFloat] | None = None
    dispatch_s: PositiveFloat | None = None
    elementwise_flops: PositiveFloat | None = None
    pass_bytes_per_s: PositiveFloat | None = None
    kernel_rates: KernelRates | None = None
    product_rates: dict[Literal[DTYPES], Rates] = Field(default_factory=dict)
    batched_rates: dict[Literal[DTYPES], Rates] = Field(default_factory=dict)
    devices_per_chip: PositiveInt = 1
    libtpu_name: str | None = None
    device_kinds: tuple[str, ...] = ()
    compute_capability: str | None = None
    slices: tuple[str, ...] = ()
    notes: str = ""
    sources: dict[str, tuple[str, ...]]

    @property
    def runs_kernels(self) -> bool:
        """True if kernels_pallas compiles for this chip: TPUs from v4 on, NVIDIA's GPUs from Ampere on."""
        return self.kind == "tpu" or float(self.compute_capability or 0) >= 8.0

    def peak(self, dtype: Any) -> float:
        """Return FLOP/s of dense matrix products of a type, as XLA runs them by default: float32 runs as `float32_as`.

        The rate of products in full float32 (precision "highest") is `peak_flops["float32"]`, if it is published.
        Raises InputError if the chip has no published figure.
        """
        name = canonical_dtype(dtype)
        run_as = self.float32_as or name if name == "float32" else name
        if run_as not in self.peak_flops:
            has = ", ".join(self.peak_flops)
            remedy = "; set execution.dtype=bfloat16" if "bfloat16" in self.peak_flops and name == "float32" else ""
            raise InputError(
                f"{self.id} has no published peak for {name}; "
                + (f"it has {has}{remedy}" if has else "it has none at all")
            )
        return self.peak_flops[run_as]

    def product_rate(self, dtype: Any, side: float, batch: int = 1) -> float:
        """Return FLOP/s in a step of a product, or of a batch of products, with this smallest side: interpolated
        between the measured sides on a logarithmic scale; the peak if none were measured."""
        name = canonical_dtype(dtype)
        rates = (batch > 1 and self.batched_rates.get(name)) or self.product_rates.get(name, ())
        if not rates:
            return self.peak(dtype)
        for (low, slow), (high, fast) in itertools.pairwise(rates):
            if side <= high:
                return slow + (fast - slow) * max(0.0, math.log(side / low) / math.log(high / low))
        return rates[-1][1]

    def intensity(self, dtype: Any) -> float:
        """Return the FLOP per byte of memory traffic above which products of a type are bound by compute."""
        return self.peak(dtype) / self.memory_bytes_per_s

    def figure(self, name: str) -> Any:
        """Return a figure by its name, such as "watts" or "link.bytes_per_s". Raises InputError if unpublished."""
        value: Any = self
        for part in name.split("."):
            value = value and getattr(value, part)
        if value is None:
            raise InputError(f"{self.id} has no published {name}")
        return value

    def figures(self) -> dict[str, Any]:
        """Return every published figure by its name with dots; ranges, tiles and slices are one figure each."""
        return dict(_flat(self.model_dump(exclude_none=True, exclude=set(_NO_FIGURES))))

    def source(self, figure: str) -> str | None:
        """Return the source of a figure: an address, "recalled", or None."""
        parts = figure.split(".")
        names = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return ", ".join(source for source, backed in self.sources.items() if names & set(backed)) or None

    def device_capacity(self) -> int:
        """Return the bytes that a program may use on one device: the compiler's figure, or its share of the nominal."""
        return self.device_memory_bytes or self.memory_bytes // self.devices_per_chip

    def legal_slices(self) -> list[tuple[int, ...]]:
        """Return the topologies that exist, ascending in chips, the most cubic first among equals; none for chips that
        come in any count."""
        slices = {parse_topology(text) for text in self.slices}
        if slices and self.link.topology == "torus3d":
            slices |= set(_cubes(self.link.wraparound, self.link.domain))
        return sorted(slices, key=lambda slice: (math.prod(slice), max(slice)))


# Fields of a chip that are not figures with a source.
_NO_FIGURES = (
    "id",
    "aliases",
    "name",
    "vendor",
    "kind",
    "float32_as",
    "libtpu_name",
    "device_kinds",
    "compute_capability",
    "product_rates",
    "batched_rates",
    "notes",
    "sources",
)


def parse_topology(text: str) -> tuple[int, ...]:
    """Parse "4x4" as (4, 4)."""
    return tuple(int(size) for size in text.split("x"))


def show_topology(topology: tuple[int, ...]) -> str:
    """Format (4, 4) as "4x4"."""
    return "x".join(map(str, topology))


def _cubes(edge: int, chips: int) -> Iterator[tuple[int, ...]]:
    """Yield the slices made of whole cubes in a row, a plane or a block, of at most `chips` chips, ascending."""
    most = chips // edge**3
    for a in range(1, most + 1):
        for b in range(a, most // a + 1):
            for c in range(b, most // (a * b) + 1):
                yield a * edge, b * edge, c * edge


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value != ():
            yield prefix + name, value
