"""Choices of a mesh layout: those of a number of devices, what they must divide, and `--mesh`. Imports no JAX."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.core.schema import COUNT
from jaxlm.parallel.config import ALL, MeshConfig, MeshSection
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Rules

# An example of `--mesh`, for messages.
_EXAMPLE = "fsdp=8,tensor=2"


class ModelSize(NamedTuple):
    """A size of a model that a mesh must divide: the logical axis of its dimensions, and its key in a configuration.
    One that is `paddable` may be rounded up; others are bound to one another."""

    axis: str
    key: str
    size: int
    paddable: bool = False


def parse_mesh(text: str) -> MeshSection:
    """Return the mesh of --mesh, such as "fsdp=8,tensor=2"; axes that are not named have their default. Raises
    InputError."""
    sizes: dict[str, int] = {}
    for axis, _, size in (part.partition("=") for part in text.replace(" ", "").split(",")):
        if axis not in Layout() or not re.fullmatch(COUNT, size):
            raise InputError(
                f"--mesh {text!r} is not AXIS=N,… with axes {', '.join(Layout())} and numbers up to 999999, "
                f"such as {_EXAMPLE}"
            )
        if axis in sizes:
            raise InputError(f"--mesh {text!r} gives {axis} twice; give it once")
        sizes[axis] = int(size)
    return MeshConfig(**sizes)


def divides(layout: Layout, rules: Rules, sizes: Iterable[ModelSize]) -> bool:
    """Return whether a layout divides all sizes of a model that it must divide."""
    return all(each.size % layout.over(over) == 0 for each in sizes for over in _dividing(rules, each.axis))


def check_divides(layout: Layout, rules: Rules, sizes: Sequence[ModelSize], devices: int | None = None) -> None:
    """Raise InputError where a layout does not divide a size of a model that it must divide, naming the number to
    change, or a mesh of this number of `devices` that does."""
    for each in sizes:
        for over in _dividing(rules, each.axis):
            if each.size % (shards := layout.over(over)):
                mesh = describe_axes(over)
                fitting = None if devices is None else _fitting_mesh(layout, over, rules, sizes, devices)
                fitting = f"set {fitting or f'{mesh} to one of {some_divisors(each.size)}'}"
                if each.paddable:
                    fitting += f", or {each.key} to {math.ceil(each.size / shards) * shards}"
                raise InputError(f"{mesh} = {shards} does not divide {each.key} = {each.size}: {fitting}")


def _fitting_mesh(
    layout: Layout, axes: Iterable[str], rules: Rules, sizes: Sequence[ModelSize], devices: int
) -> str | None:
    """Return how to change a layout into one of all devices that divides the sizes, with the most shards over some
    axes; None where there is none."""
    fitting = [other for other in factorings(devices, list(Layout())) if divides(other, rules, sizes)]
    best = max(fitting, key=lambda other: (other.over(axes), -other["tensor"]), default=layout)
    return " ".join(f"mesh.{axis}={size}" for axis, size in best.items() if size != layout[axis]) or None


def layouts(devices: int, rules: Rules, fits: Callable[[Layout], bool] = lambda _: True) -> Iterator[Layout]:
    """Yield the layouts of a number of devices that `fits`, the innermost axis growing last. Of mesh axes that shard
    the same logical axes, which are one axis by two names, the first has all devices."""
    duties = {axis: rules.duties(axis) for axis in Layout()}
    named = {duty: axis for axis, duty in reversed(duties.items())}
    for layout in factorings(devices, [axis for axis, duty in duties.items() if named[duty] == axis]):
        if fits(layout):
            yield layout


def inference_layout(mesh: MeshSection, devices: int, rules: Rules, fits: Callable[[Layout], bool]) -> Layout:
    """Return the layout of a step of inference on a number of devices.

    Where an axis of the batch would take the devices that are left, and it is not the first, they go to the first,
    over which no weight is sent. The axes that shard a layer have what is given, or else the fewest devices with which
    the layout `fits`; all of them where none does.

    Raises InputError where the mesh does not divide the devices.
    """
    layout, sizes = mesh.layout(devices), mesh.sizes()
    batch, rest = rules.over("batch"), next((axis for axis, size in sizes.items() if size == ALL), None)
    if rest not in batch[1:] or sizes[batch[0]] != 1:
        return layout
    given = {axis: size for axis, size in layout.items() if axis != rest and sizes[axis] != 1}
    free = [axis for axis in layout if axis in rules.of_layers and axis not in given]
    candidates = [each.replace(**given) for each in factorings(devices // Layout(given).size, [batch[0], *free])]
    candidates.sort(key=lambda each: each.over(free))
    return next(filter(fits, candidates), candidates[-1])


def factorings(devices: int, axes: Sequence[str]) -> Iterator[Layout]:
    """Yield every layout of a number of devices over some axes, the innermost growing last."""
    outermost, *others = axes
    if not others:
        yield Layout({outermost: devices})
        return
    innermost = others[-1]
    for size in divisors(devices):
        for rest in factorings(devices // size, axes[:-1]):
            yield rest.replace(**{innermost: size})


def with_shards(rules: Rules, **shards: int) -> Layout:
    """Return the layout in which the dimensions of each of these logical axes have so many shards."""
    return Layout({rules.over(axis)[0]: count for axis, count in shards.items()})


def describe_axes(axes: Iterable[str]) -> str:
    """Return mesh axes as their keys in a configuration."""
    return " × ".join(f"mesh.{axis}" for axis in axes)


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def some_divisors(n: int) -> str:
    """Return the first divisors of a number, for a message."""
    return ", ".join(map(str, divisors(n)[:8]))


def _dividing(rules: Rules, axis: str) -> Iterable[tuple[str, ...]]:
    """Return the mesh axes that together must divide a dimension, as it is stored and while a layer computes."""
    return () if axis in rules.may_stay_whole else dict.fromkeys((rules.over(axis), rules.computed_over(axis)))
