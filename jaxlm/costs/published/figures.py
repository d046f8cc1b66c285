"""The figures of published cases, each counted with the cost model from a case's workload and target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxlm.core.schema import merged
from jaxlm.costs import plan
from jaxlm.costs.counted import cache, layer_memory, memory, operations
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.stack import Stack, stack_from
from jaxlm.costs.timing.step_time import step_time
from jaxlm.costs.workload import Workload

DAY = 86_400.0


class Range(NamedTuple):
    """The counted range of a measured figure: at the lower bound of time, which no program beats; at the fast end of
    the bracket; at the expected time, which is the prediction; and at the slow end. A rate falls from the first on."""

    bound: float
    fast: float
    expected: float
    slow: float


@dataclass(frozen=True)
class CaseSetting:
    """The workload, the target and the software of a case, as far as it gives them."""

    work: Workload | None
    target: Target | None
    stack: Stack = Stack()


FIGURES: dict[str, Callable[..., float | Range]] = {}


def _figure(function: Callable[..., float | Range]) -> Callable[..., float | Range]:
    FIGURES[function.__name__] = function
    return function


# Closed forms of a model.


@_figure
def parameters(setting: CaseSetting) -> float:
    """The number of parameters of the model, tied ones once."""
    return plan.parameter_counts(setting.work)["total"]


@_figure
def parameter_bytes(setting: CaseSetting) -> float:
    """Bytes of all parameters in the compute dtype."""
    return plan.parameter_counts(setting.work)["total"] * setting.work.itemsize


@_figure
def kv_bytes_per_token(setting: CaseSetting) -> float:
    """Bytes of keys and values that a token adds to the cache, over all layers and devices."""
    return cache.kv_bytes_per_token(setting.work)


@_figure
def model_flops(setting: CaseSetting) -> float:
    """Matmul FLOPs of one step, recomputation excluded."""
    return flops(setting.work).model


@_figure
def napkin_flops(setting: CaseSetting, tokens: float) -> float:
    """FLOPs of `tokens` tokens by the textbook formula."""
    return flops(setting.work).napkin / setting.work.tokens * tokens


@_figure
def attention_crossover(setting: CaseSetting) -> float:
    """Tokens at which attention's own products, which grow quadratically, cost as much as its projections."""
    forward = [op for op in operations.step(setting.work) if op.phase == "forward"]
    modules = {op.scope.rpartition("/")[0] for op in forward if op.visible}
    of_modules = [op for op in forward if op.product and op.scope.rpartition("/")[0] in modules]
    attention = sum(op.times * op.flops for op in of_modules if op.visible)
    projections = sum(op.times * op.flops for op in of_modules) - attention
    return setting.work.sequence * projections / attention


@_figure
def mfu(setting: CaseSetting, seconds: float) -> float:
    """Model FLOP utilisation in percent, at a measured time."""
    target = setting.target
    return 100 * plan.mfu(flops(setting.work).model, seconds, target.chip, target.chips, setting.work.dtype)


# Memory, in bytes on one device.


@_figure
def checkpoint_bytes(setting: CaseSetting) -> float:
    """Float32 parameters and optimizer state."""
    return 4 * plan.parameter_counts(setting.work)["total"] + memory.trained(setting.work).optimizer


@_figure
def held_bytes(setting: CaseSetting) -> float:
    """Parameters, gradients and optimizer state."""
    return memory.trained(setting.work).total


@_figure
def memory_bytes(setting: CaseSetting) -> float:
    """All memory, at the peak of a step."""
    return memory.memory(setting.work.on(setting.target.chip) if setting.target else setting.work).total


@_figure
def kept_bytes(setting: CaseSetting) -> float:
    """Activations that all layers keep for the backward pass."""
    return layer_memory.kept(device_step(setting.work))


@_figure
def largest_model(setting: CaseSetting) -> float:
    """Parameters whose training state fills the memory of the target."""
    each = held_bytes(setting) / plan.parameter_counts(setting.work)["total"]
    return setting.target.chips * setting.target.chip.memory_bytes / each


@_figure
def inference_bytes(setting: CaseSetting) -> float:
    """Parameters and cache."""
    held = memory.memory(setting.work)
    return held.parameters + held.kv_cache


# Roofline.


@_figure
def critical_tokens(setting: CaseSetting, dtype: str, width: int, over: str = "memory_bytes_per_s") -> float:
    """Tokens whose products take as long as their weights take to move at the chip's rate `over`; `width` is the bytes
    of one weight."""
    chip = setting.target.chip
    return chip.peak(dtype) / chip.figure(over) * width / 2


@_figure
def intensity(setting: CaseSetting, dtype: str) -> float:
    """FLOP per byte of memory traffic above which products of a type are bound by compute."""
    return setting.target.chip.intensity(dtype)


@_figure
def memory_seconds(setting: CaseSetting, bytes: float) -> float:
    """Seconds to read `bytes`, sharded over all chips."""
    return bytes / (setting.target.chips * setting.target.chip.memory_bytes_per_s)


@_figure
def step_memory_seconds(setting: CaseSetting) -> float:
    """Seconds for the least memory traffic of a step."""
    return plan.plan(setting.work, setting.target).time.memory


@_figure
def peak(setting: CaseSetting, dtype: str) -> float:
    """Rated FLOP/s of all chips together."""
    return setting.target.chips * setting.target.chip.peak(dtype)


@_figure
def cores(setting: CaseSetting) -> float:
    """SMs, TensorCores or CUs (`on_chip.core`) of all chips together."""
    return setting.target.chips * setting.target.chip.figure("on_chip.cores")


# Collectives.


@_figure
def collective_seconds(
    setting: CaseSetting, kind: str, bytes: float, mesh: dict[str, int], axes: Sequence[str]
) -> float:
    """Seconds of one collective over axes of a mesh, with `bytes` on each device: see `Network.seconds`."""
    return Network(setting.target, mesh).seconds(kind, bytes, axes)


@_figure
def bus_bytes_per_s(setting: CaseSetting, bytes: float) -> float:
    """The bus bandwidth, as NCCL defines it, of an all-reduce over all chips."""
    n = setting.target.chips
    seconds = Network(setting.target, {"all": n}).seconds("all-reduce", bytes, "all")
    return 2 * (n - 1) / n * bytes / seconds


# Times of whole runs, at a rate that was measured or is given.


@_figure
def days(setting: CaseSetting, tokens: float, flops_per_s: float | None = None, mfu: float | None = None) -> float:
    """Days of the napkin FLOPs on all chips, at `flops_per_s` each or at a share `mfu` of their peak."""
    target = setting.target
    rate = flops_per_s or mfu * target.chip.peak(setting.work.dtype)
    return napkin_flops(setting, tokens) / (target.chips * rate) / DAY


@_figure
def seconds_at(setting: CaseSetting, mfu: float) -> float:
    """Seconds of a step's napkin FLOPs at a share `mfu` of the peak."""
    target = setting.target
    return flops(setting.work).napkin / (target.chips * target.chip.peak(setting.work.dtype) * mfu)


# Measured: brackets.


def estimate(work: Workload, target: Target, stack: Stack) -> Range:
    """Return the range of a step's seconds, of a workload as it is on the target's chip."""
    time = step_time(work, target, stack)
    return Range(time.lower_bound, time.low, time.expected, time.upper_bound)


def _time(setting: CaseSetting) -> Range:
    return estimate(setting.work.on(setting.target.chip), setting.target, setting.stack)


@_figure
def step_seconds(setting: CaseSetting) -> Range:
    """Seconds of a step."""
    return _time(setting)


@_figure
def speedup(setting: CaseSetting, over: dict[str, Any]) -> float:
    """The expected time of a step under the case's stack with the keys `over`, as a multiple of that without them."""
    other = stack_from(merged(setting.stack.model_dump(), over))
    return step_seconds(replace(setting, stack=other)).expected / step_seconds(setting).expected


@_figure
def tokens_per_s(setting: CaseSetting) -> Range:
    """Tokens per second of all chips together."""
    return Range(*(setting.work.tokens / seconds for seconds in _time(setting)))


@_figure
def chip_hours(setting: CaseSetting, tokens: float) -> Range:
    """Chip-hours for `tokens` tokens."""
    steps = tokens / setting.work.tokens
    return Range(*(steps * seconds * setting.target.chips / 3600 for seconds in _time(setting)))


@_figure
def model_flops_per_s(setting: CaseSetting) -> Range:
    """Model FLOP/s per chip, with all scores of attention."""
    cost = flops(setting.work).model
    return Range(*(cost / (seconds * setting.target.chips) for seconds in _time(setting)))


@_figure
def measured_mfu(setting: CaseSetting) -> Range:
    """Model FLOP utilisation in percent, with all scores of attention."""
    peak = setting.target.chip.peak(setting.work.dtype)
    return Range(*(100 * rate / peak for rate in model_flops_per_s(setting)))


@_figure
def megatron_flops_per_s(setting: CaseSetting) -> Range:
    """FLOP/s per chip, with FLOPs and full recomputation as Narayanan et al. count them."""
    cost = megatron_flops(setting.work)
    return Range(*(cost / (seconds * setting.target.chips) for seconds in _time(setting)))


def megatron_flops(work: Workload) -> float:
    """Return the FLOPs of a step with full recomputation of a model whose feed-forward layer is four times as wide
    (Narayanan et al. 2021, arXiv:2104.04473, equation 3)."""
    model = work.model
    B, S, L, D, V = work.batch, work.sequence, model.num_layers, model.d_model, model.vocab_size
    return 96 * B * S * L * D**2 * (1 + S / (6 * D) + V / (16 * L * D))
