"""The cost of a step on chips that need not be here: FLOPs, memory, a bracket of time, money and energy."""

import math
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.costs.counted import operations, traffic
from jaxlm.costs.counted.cache import kv_bytes_per_token
from jaxlm.costs.counted.device import replicated_kv_heads
from jaxlm.costs.counted.flops import Flops, flops
from jaxlm.costs.counted.memory import Memory, memory
from jaxlm.costs.counted.operations import Operation
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.layer_loops import LayerChoice, choose
from jaxlm.costs.napkin import Napkin, napkin
from jaxlm.costs.workload import Workload
from jaxlm.models.doors.cost import Product


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on each device.

    `compute`: all products at the chip's peak; kernels skip the scores of attention that causality and windows hide.
    `memory`: the least traffic at the chip's bandwidth. `collectives`: all collectives, one after the other.
    `lower_bound`: each operation takes the longer of its compute and its least traffic, and collectives overlap with
    the operations; each row is one document. `upper_bound`: nothing overlaps and nothing is fused into products.
    Products are padded to whole tiles of the matrix unit; products and the passes between them run at the rates that
    were measured within a step, or else of kernels (`Chip.kernel_rates`), where there are any; the element-wise FLOPs
    of passes take additional time if the chip's rate for them is known. `expected`: with kernels on a chip where their
    rates were measured, all operations one after the other, each of which takes the longer of its product, hidden
    scores included, and the most that it moves, at these rates; otherwise the geometric mean of the bounds.
    `below_peak`: the part of the upper bound that products, all scores included, take beyond their time at the peak.
    """

    compute: float
    memory: float
    collectives: float
    lower_bound: float
    expected: float
    upper_bound: float
    below_peak: float

    @property
    def bound_by(self) -> str:
        parts = {"compute": self.compute, "memory": self.memory, "collectives": self.collectives}
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class Plan:
    """A workload on a target. Rates and prices are at the expected time of the step. `layers`: in training, whether
    they run in a loop."""

    work: Workload
    target: Target
    flops: Flops
    memory: Memory
    time: StepTime
    layers: LayerChoice | None = None

    @property
    def capacity(self) -> int:
        return self.target.chip.device_capacity()

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    @property
    def napkin(self) -> Napkin:
        return napkin(self.work, self.target)

    @property
    def tokens_per_s(self) -> float:
        return self.work.tokens / self.time.expected

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: model FLOPs (attention counted whole) per second, as a share of the peak in the
        workload's dtype."""
        return mfu(self.flops.model, self.time.expected, self.target.chip, self.target.chips, self.work.dtype)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The price of a million tokens at the geometric mean of the chip's prices; None if no price is published."""
        return self._usd_per_s and self._usd_per_s / self.tokens_per_s * 1e6

    @property
    def run_s(self) -> float | None:
        """Seconds of all steps of a training run, or of the one step of inference; None if its steps are not known."""
        return self.work.steps and self.work.steps * self.time.expected

    @property
    def usd_per_run(self) -> float | None:
        """The price of `run_s`; None if no price is published, or its steps are not known."""
        return self._usd_per_s and self.run_s and self._usd_per_s * self.run_s

    @property
    def _usd_per_s(self) -> float | None:
        price = self.target.chip.usd_per_hour
        return price and math.sqrt(price[0] * price[1]) * self.target.chips / 3600

    @property
    def joules_per_token(self) -> float | None:
        """Energy at the chips' rated power; None if the rated power is not published."""
        watts = self.target.chip.watts
        return watts and watts * self.target.chips / self.tokens_per_s

    def row(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        time, first = self.time, self.napkin
        return {
            "chips": self.target.chips,
            "devices": self.target.devices,
            "target": str(self.target),
            "workload": self.work.kind,
            "mesh": dict(self.work.layout),
            "batch": self.work.batch,
            "sequence": self.work.sequence,
            "microbatches": self.work.microbatches,
            "remat": self.work.remat,
            "replicated_kv_heads": bool(replicated_kv_heads(self.work)),
            "parameters": parameter_counts(self.work),
            "napkin": {**first._asdict(), "tokens_per_s": first.step_s and self.work.tokens / first.step_s},
            "flops": self.flops._asdict(),
            "memory_bytes_per_device": {**self.memory._asdict(), "total": self.memory.total, "capacity": self.capacity},
            "fits": self.fits,
            "time_s": {
                "compute": time.compute,
                "memory": time.memory,
                "collectives": time.collectives,
                "lower_bound": time.lower_bound,
                "expected": time.expected,
                "upper_bound": time.upper_bound,
            },
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "bound_by": time.bound_by,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "joules_per_token": self.joules_per_token,
            **self._of_its_kind(),
        }

    def _of_its_kind(self) -> dict[str, Any]:
        match self.work.kind:
            case "train":
                run = {"steps": self.work.steps, "run_s": self.run_s, "usd_per_run": self.usd_per_run}
                return {"layers": self.layers and self.layers.row(), **run}
            case "prefill":
                return {"time_to_first_token_s": self.time.expected, **self._of_the_engine()}
            case _:
                return {"time_per_token_s": self.time.expected, **self._of_the_engine()}

    def _of_the_engine(self) -> dict[str, Any]:
        all_steps = [work.engine_steps for work in self.work.by_step_shape()]
        shapes = [{"rows": each.shape.rows, "draws": each.shape.decode, "times": each.times} for each in all_steps]
        engine = {"sequences_per_shard": self.work.slots, "page": self.work.page, "steps": shapes}
        return {"kv_bytes_per_token": kv_bytes_per_token(self.work), "engine": engine}


def plan(work: Workload, target: Target) -> Plan:
    """Count a workload on a target.

    Raises InputError where the mesh does not make up the target's devices, where the chip lacks a figure that is
    needed, or where the sequence is longer than the model's context.
    """
    if work.layout.size != target.devices:
        raise InputError(
            f"the mesh {work.layout} has {work.layout.size} devices and {target} has {target.devices}: "
            f"{' × '.join(work.layout)} must give that number"
        )
    if work.sequence > work.model.context_length:
        raise InputError(
            f"a sequence of {work.sequence} is longer than model.context_length = {work.model.context_length}"
        )
    work, layers = work.on(target.chip), None
    if work.kind == "train":
        layers = choose(work, target.chip.device_capacity())
        work = work.with_execution(scan_layers=layers.in_loop)
    return Plan(work, target, flops(work), memory(work), step_time(work, target), layers)


def step_time(work: Workload, target: Target) -> StepTime:
    """Return the bracket of a step's time on each device, and the expected time."""
    chip = target.chip
    rates = chip.kernel_rates if work.runs_kernels else None
    share = 1 / chip.devices_per_chip  # of the chip's rates, for one device
    bandwidth, elementwise = share * chip.memory_bytes_per_s, share * _elementwise_rate(chip)
    moves = share * rates.copy_bytes_per_s if rates else bandwidth
    passes = share * chip.pass_bytes_per_s if chip.pass_bytes_per_s else moves
    compute = at_peak = least = together = apart = products = in_turn = 0.0
    peaks: dict[str, float] = {}
    for op in operations.step(work):
        dtype = dtype_of(op, work)
        if dtype not in peaks:
            peaks[dtype] = share * chip.peak(dtype)
        ideal, fused = op.least_flops / peaks[dtype], op.least_bytes / bandwidth
        compute += op.times * ideal
        least += op.times * fused
        together += op.times * max(ideal, fused)
        moved, alone = op.most_bytes / (moves if op.product else passes), 0.0
        if op.product:
            at_peak += op.times * op.flops / peaks[dtype]
            batch, *sizes = op.product
            measured = rates and rates.product_flops.get(dtype)
            rate = share * (measured or chip.product_rate(dtype, min(sizes), batch))
            products += op.times * _in_tiles(op.product, chip) / rate
            alone = op.flops / rate
        apart += op.times * (moved + op.elementwise / elementwise)
        in_turn += op.times * max(alone, moved)
    network = Network(target, work.layout)
    sent = sum(c.times * network.seconds(c.kind, c.bytes, c.axes) for c in traffic.collectives(work))
    start = work.dispatches * (chip.dispatch_s or 0.0)
    lower, upper = max(together, sent), products + apart + sent + start
    is_measured = rates is not None and work.dtype in rates.product_flops
    expected = max(in_turn, sent) + start if is_measured else math.sqrt(lower * upper)
    return StepTime(compute, least, sent, lower, expected, upper, max(0.0, products - at_peak))


def dtype_of(op: Operation, work: Workload) -> str:
    """Return the dtype that an operation computes in: the products of an optimizer are float32."""
    return "float32" if op.phase == "optimizer" and op.product else work.dtype


def _elementwise_rate(chip: Chip) -> float:
    """Return the FLOP/s of element-wise work: as measured, or for a GPU half the peak of its float32 units."""
    if chip.elementwise_flops is not None:
        return chip.elementwise_flops
    # A peak counts a multiplication and an addition at once.
    return chip.peak_flops["float32"] / 2 if chip.kind == "gpu" and "float32" in chip.peak_flops else math.inf


def _in_tiles(product: Product, chip: Chip) -> int:
    """Return the FLOPs of a product whose sizes are padded to whole tiles of the matrix unit."""
    if chip.on_chip is None or chip.on_chip.matrix_tile is None:
        return product.flops
    batch, *sizes = product
    padded = (math.ceil(size / tile) * tile for size, tile in zip(sizes, chip.on_chip.matrix_tile, strict=True))
    return Product(batch, *padded).flops


def parameter_counts(work: Workload) -> dict[str, int]:
    """Return the number of parameters: in total, active for each token, in the embedding tables, and in training of
    the parameters that train."""
    sizes = {path: math.prod(d.shape) for path, d in work.parameters.items()}
    total = sum(sizes.values())
    tables = sum(sizes[path] for path, d in work.parameters.items() if d.table)
    counts = {"total": total, "active": total, "embedding": tables}
    return counts | ({"trainable": total - sum(sizes[path] for path in work.frozen)} if work.kind == "train" else {})


def mfu(flops: float, seconds: float, chip: Chip, chips: int, dtype: str) -> float:
    """Return the rate of these FLOPs in these seconds, as a share of the chips' peak."""
    return flops / (seconds * chips * chip.peak(dtype))
