"""Figures of a chip: peaks, memories, links. Units are SI: FLOP/s, bytes, bytes/s, seconds, W, USD.

A chip is what is sold; a device is what JAX shards over (`devices_per_chip`). An unpublished figure is None, and
`Chip.figure` reports that in one line.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from jaxlm.core.errors import InputError
from jaxlm.core.schema import Section, leaves
from jaxlm.costs.hardware.sustained import Sustained

# The names of dtypes under which peaks are listed; all formats of one width share a name.
DTYPES = ("bfloat16", "float16", "tf32", "float32", "float8", "float6", "float4", "int8", "int4")
_SHORT = {"bf": "bfloat", "fp": "float", "f": "float", "i": "int", "s": "int"}


def _in_range(figure: float) -> float:
    if not 1e-12 <= figure <= 1e24:
        raise PydanticCustomError("range", "Input should be from 1e-12 to 1e24")
    return figure


# Beyond any chip's, and so that times and costs stay finite numbers.
PositiveFigure = Annotated[PositiveFloat, AfterValidator(_in_range)]


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
    clock_hz: PositiveFigure | None = None
    registers_bytes: PositiveInt | None = None
    scratchpad_bytes: PositiveInt | None = None
    scratchpad_bytes_per_s: PositiveFigure | None = None
    block_scratchpad_bytes: PositiveInt | None = None
    tensor_memory_bytes: PositiveInt | None = None
    shared_bytes: PositiveInt | None = None
    shared_bytes_per_s: PositiveFigure | None = None
    l2_bytes: PositiveInt | None = None
    l2_bytes_per_s: PositiveFigure | None = None
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
    link_bytes_per_s: PositiveFigure | None = None
    bytes_per_s: PositiveFigure | None = None
    latency_s: PositiveFigure | None = None
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


class Chip(Section):
    """One chip.

    `aliases` are other names for its `id`, such as "h100" for the SXM part. `memory_bytes` is the nominal memory of the
    chip; `device_memory_bytes` is what a program may use of it on one device. `host_bytes_per_s` (PCIe) and
    `scale_out_bytes_per_s` (network) are one-way and per chip. `usd_per_hour` is the range of prices of one chip.

    `sustained`: what programs reach of these peaks (`SustainedRates` looks it up, and what it lacks).

    `float32_as` is the type in which XLA multiplies float32 at its default precision: TF32 on NVIDIA's chips since
    Ampere, one bfloat16 pass on a TPU; None is float32 itself. `device_kinds` are JAX's names of its devices; NVIDIA's
    have a `compute_capability`. `slices` are a TPU's legal slices except those made of whole cubes (`legal_slices`).
    `sources` maps each source to the figures that it backs, with dots. `notes` says where sources disagree.
    """

    id: str
    aliases: tuple[str, ...] = ()
    name: str
    vendor: str
    kind: Literal["gpu", "tpu", "asic", "fpga", "apple", "cpu"]
    peak_flops: dict[Literal[DTYPES], PositiveFigure] = Field(default_factory=dict)
    float32_as: Literal["tf32", "bfloat16"] | None = None
    memory_bytes: PositiveInt = Field(default=None)  # every chip of a target has the memory's figures
    device_memory_bytes: PositiveInt | None = None
    memory_bytes_per_s: PositiveFigure = Field(default=None)
    on_chip: OnChip | None = None
    link: Link | None = None
    host_bytes_per_s: PositiveFigure | None = None
    scale_out_bytes_per_s: PositiveFigure | None = None
    watts: PositiveFigure | None = None
    usd_per_hour: tuple[PositiveFigure, PositiveFigure] | None = None
    sustained: Sustained = Sustained()
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
        return self.libtpu_name is not None or float(self.compute_capability or 0) >= 8.0

    def peak(self, dtype: Any) -> float:
        """Return FLOP/s of dense matrix products of a type, as XLA runs them by default: float32 runs as `float32_as`.

        The rate of products in full float32 (precision "highest") is `peak_flops["float32"]`, if it is published.
        Raises InputError if the chip has no published figure.
        """
        name = canonical_dtype(dtype)
        run_as = self.float32_as or name if name == "float32" else name
        if run_as not in self.peak_flops:
            has = ", ".join(self.peak_flops)
            remedy = f"give one with --chip peak_flops.{run_as}=FLOP/s"
            if name == "float32" and "bfloat16" in self.peak_flops:
                remedy = f"set execution.dtype=bfloat16, or {remedy}"
            raise InputError(f"{self.id} has no published peak for {name}, only for {has or 'no type'}; {remedy}")
        return self.peak_flops[run_as]

    def intensity(self, dtype: Any) -> float:
        """Return the FLOP per byte of memory traffic above which products of a type are bound by compute."""
        return self.peak(dtype) / self.memory_bytes_per_s

    def figure(self, name: str) -> Any:
        """Return a figure by its name, such as "watts" or "link.bytes_per_s". Raises InputError if unpublished."""
        value: Any = self
        for part in name.split("."):
            value = value and getattr(value, part)
        if value is None:
            raise InputError(f"{self.id} has no published {name}; give one with --chip {name}=NUMBER")
        return value

    def figures(self) -> dict[str, Any]:
        """Return every published figure by its name with dots; ranges, tiles and slices are one figure each."""
        values = self.model_dump(exclude_none=True, exclude=set(NO_FIGURES))
        return {name: value for name, value in leaves(values) if value != ()}

    def source(self, figure: str) -> str | None:
        """Return the source of a figure: an address, or how it was found; None for a figure without one."""
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
NO_FIGURES = (
    "id",
    "aliases",
    "name",
    "vendor",
    "kind",
    "float32_as",
    "libtpu_name",
    "device_kinds",
    "compute_capability",
    "sustained",
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
