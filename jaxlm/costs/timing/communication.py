"""Seconds of the collectives of a step at sustained rates, and how many of them computation does not hide."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxlm.costs.counted.collective import Collective
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.hardware.rates import SustainedRates
from jaxlm.costs.stack import Stack
from jaxlm.costs.timing.computation import Part

# Collectives over networks were measured among 32 GPUs, and send a part of their bytes in each of as many steps. A
# permutation is one of them.
_STEPS = 32


class Communication(NamedTuple):
    """Collectives that computation does not hide, by kind and axes, their bytes on each device, and the seconds of
    those that it hides."""

    exposed: dict[str, Part]
    exposed_bytes: float
    hidden: float


def sustained_time(
    network: Network, rates: SustainedRates, stack: Stack, kind: str, size: float, axes: tuple[str, ...]
) -> Part:
    """Return the time of one collective of `size` bytes under a stack, at sustained rates: none over one device."""
    devices = network.over(axes)
    if devices == 1 or not size:
        return Part()
    across = any(span.dimension.name == "network" for span in network.spans(axes))
    if not across and (measured := rates.collective(kind, devices, size, stack.all_reduce)):
        factor = (2 if kind == "all-reduce" else 1) * (devices - 1) / devices
        once = max(measured.floor_s, factor * (size + measured.half_bytes) / measured.bus_bytes_per_s)
        return Part(once, 0.0, measured.spread * once)
    link = rates.link("network" if across else "domain")
    half_bytes = link.half_bytes / (_STEPS if kind == "collective-permute" else 1)
    once = network.seconds(kind, size + half_bytes, axes) / link.share
    return Part(once, 0.0, link.spread * once)


def communication(
    collectives: Iterable[Collective],
    network: Network,
    rates: SustainedRates,
    stack: Stack,
    phases: Mapping[str, float],
) -> Communication:
    """Return the seconds of collectives that the computation of each phase does not hide.

    A collective runs behind the computation of its pass that does not depend on it (`Collective.behind`), as far as
    that is long enough: collectives of one pass share the links. Runs that `waits` counts are behind nothing.
    """
    exposed: dict[str, Part] = defaultdict(Part)
    behind: dict[str, dict[str, Part]] = defaultdict(lambda: defaultdict(Part))
    exposed_bytes, bytes_behind = 0.0, defaultdict[str, float](float)
    for each in collectives:
        name = f"{each.kind} over {' and '.join(each.axes)}"
        is_wider = each.narrow_gradients and stack.gradient_dtype == "float32"
        once = sustained_time(network, rates, stack, each.kind, (1 + is_wider) * each.bytes, each.axes)
        alone = each.times if each.behind is None or stack.overlap == "none" else min(each.waits, each.times)
        exposed[name] += once.times(alone)
        exposed_bytes += alone * each.bytes
        if each.times > alone:
            bytes_behind[each.behind] += (each.times - alone) * each.bytes
            behind[each.behind][name] += once.times(each.times - alone)
    hidden = 0.0
    for phase, parts in behind.items():
        whole = sum(part.seconds for part in parts.values())
        left = max(0.0, whole - phases.get(phase, 0.0))
        hidden += whole - left
        exposed_bytes += bytes_behind[phase] * left / whole if left else 0.0
        for name, part in parts.items() if left else ():
            exposed[name] += part.times(left / whole)
    return Communication({name: part for name, part in exposed.items() if part.seconds}, exposed_bytes, hidden)
