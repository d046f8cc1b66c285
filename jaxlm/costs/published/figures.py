"""The figures that published cases are about, each counted with the cost model from a case's setting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxlm.costs import plan
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.step import layer_memory, memory, operations
from jaxlm.costs.step.flops import flops
from jaxlm.costs.workload import Workload

DAY = 86_400.0


class Range(NamedTuple):
    """What is counted of a measured figure: at the lower and the upper bound of time, and at their geometric middle,
    which is the prediction. A rate falls from the first to the last."""

    fast: float
    middle: float
    slow: float


@dataclass(frozen=True)
class CaseSetting:
    """What a case is about, as far as it says: work and chips."""

    work: Workload | None
    target: Target | None


FIGURES: dict[str, Callable[..., float | Range]] = {}


def _figure(function: Callable[..., float | Range]) -> Callable[..., float | Range]:
    FIGURES[function.__name__] = function
    return function


# Closed forms of a model.


@_figure
def parameters(setting: CaseSetting) -> float:
    """How many the model has, tied ones once."""
    return plan.parameter_counts(setting.work)["total"]


@_figure
def parameter_bytes(setting: CaseSetting) -> float:
    """Bytes of all parameters in the dtype that computes."""
    return plan.parameter_counts(setting.work)["total"] * setting.work.itemsize


@_figure
def kv_bytes_per_token(setting: CaseSetting) -> float:
    """Bytes of keys and values that a token adds to the cache, over all layers and devices."""
    return memory.kv_bytes_per_token(setting.work)


@_figure
def model_flops(setting: CaseSetting) -> float:
    """Of a step, each product once."""
    return flops(setting.work).model


@_figure
def napkin_flops(setting: CaseSetting, tokens: float) -> float:
    """FLOPs by the textbook formula of so many tokens."""
    return flops(setting.work).napkin / setting.work.tokens * tokens


@_figure
def attention_crossover(setting: CaseSetting) -> float:
    """Tokens at which attention's products cost as much as its projections; the first grow with the square."""
    forward = [op for op in operations.step(setting.work) if op.phase == "forward"]
    attention = sum(op.times * op.flops for op in forward if op.scope in (operations.SCORES, operations.MIXTURE))
    projections = sum(op.times * op.flops for op in forward if op.product and "/attention/" in op.scope) - attention
    return setting.work.sequence * projections / attention


@_figure
def mfu(setting: CaseSetting, seconds: float) -> float:
    """Percent, of the model FLOPs in a time that was measured."""
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
    """All of it, at the peak of a step."""
    return memory.memory(setting.work, setting.target.chip.kind if setting.target else "gpu").total


@_figure
def kept_bytes(setting: CaseSetting) -> float:
    """Activations that all layers keep for the backward pass."""
    return layer_memory.kept(setting.work)


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
    """Tokens whose products take as long as the weights that they meet, of so many bytes each, take over a way."""
    chip = setting.target.chip
    return chip.peak(dtype) / chip.figure(over) * width / 2


@_figure
def intensity(setting: CaseSetting, dtype: str) -> float:
    """FLOP per byte of memory traffic above which products of a type are bound by compute."""
    return setting.target.chip.intensity(dtype)


@_figure
def memory_seconds(setting: CaseSetting, bytes: float) -> float:
    """To read so many bytes, parted over all chips."""
    return bytes / (setting.target.chips * setting.target.chip.memory_bytes_per_s)


@_figure
def step_memory_seconds(setting: CaseSetting) -> float:
    """For the least memory traffic of a step."""
    return plan.plan(setting.work, setting.target).time.memory


@_figure
def peak(setting: CaseSetting, dtype: str) -> float:
    """FLOP/s of all chips together, as they are rated."""
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
    """Seconds of one collective over axes of a mesh, of so many bytes on each device: see `Network.seconds`."""
    return Network(setting.target, mesh).seconds(kind, bytes, axes)


@_figure
def bus_bytes_per_s(setting: CaseSetting, bytes: float) -> float:
    """What NCCL calls the bus bandwidth of an all-reduce over all chips."""
    n = setting.target.chips
    seconds = Network(setting.target, {"all": n}).seconds("all-reduce", bytes, "all")
    return 2 * (n - 1) / n * bytes / seconds


# How long whole runs take, at a rate that was measured or is given.


@_figure
def days(setting: CaseSetting, tokens: float, flops_per_s: float | None = None, mfu: float | None = None) -> float:
    """Of the napkin FLOPs: on all chips at so many FLOP/s each, or at a share of their peak."""
    target = setting.target
    rate = flops_per_s or mfu * target.chip.peak(setting.work.dtype)
    return napkin_flops(setting, tokens) / (target.chips * rate) / DAY


@_figure
def seconds_at(setting: CaseSetting, mfu: float) -> float:
    """Of a step's napkin FLOPs at a share of the peak."""
    target = setting.target
    return flops(setting.work).napkin / (target.chips * target.chip.peak(setting.work.dtype) * mfu)


# Measured: brackets.


def _time(setting: CaseSetting) -> Range:
    time = plan.plan(setting.work, setting.target).time
    return Range(time.lower_bound, time.expected, time.upper_bound)


@_figure
def step_seconds(setting: CaseSetting) -> Range:
    """Seconds of a step."""
    return _time(setting)


@_figure
def tokens_per_s(setting: CaseSetting) -> Range:
    """Tokens that all chips together read per second."""
    return Range(*(setting.work.tokens / seconds for seconds in _time(setting)))


@_figure
def chip_hours(setting: CaseSetting, tokens: float) -> Range:
    """Hours of so many tokens, times the chips."""
    steps = tokens / setting.work.tokens
    return Range(*(steps * seconds * setting.target.chips / 3600 for seconds in _time(setting)))


@_figure
def megatron_flops_per_s(setting: CaseSetting) -> Range:
    """Per chip, of the FLOPs with full recomputation as Narayanan et al. count them (arXiv:2104.04473, equation 3)."""
    work, model = setting.work, setting.work.model
    B, S, L, D, V = work.batch, work.sequence, model.num_layers, model.d_model, model.vocab_size
    cost = 96 * B * S * L * D**2 * (1 + S / (6 * D) + V / (16 * L * D))
    return Range(*(cost / (seconds * setting.target.chips) for seconds in _time(setting)))
