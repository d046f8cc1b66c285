"""Choices of a mesh layout: those of a number of devices, what they must divide, and `--mesh`. Imports no JAX."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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


class _Undivided(NamedTuple):
    """A size of a model that a layout does not divide, the mesh axes over which it should, and their devices."""

    size: ModelSize
    over: tuple[str, ...]
    shards: int

    def __str__(self) -> str:
        return f"{describe_axes(self.over)} = {self.shards} does not divide {self.size.key} = {self.size.size}"


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
    return not any(_undivided(layout, rules, sizes))


def _undivided(layout: Layout, rules: Rules, sizes: Iterable[ModelSize]) -> Iterator[_Undivided]:
    """Yield the sizes that a layout must divide and does not."""
    for each in sizes:
        for over in _dividing(rules, each.axis):
            if each.size % (shards := layout.over(over)):
                yield _Undivided(each, tuple(axis for axis in over if layout[axis] > 1), shards)


def check_divides(layout: Layout, rules: Rules, sizes: Sequence[ModelSize], devices: int | None = None) -> None:
    """Raise InputError where a layout does not divide a size of a model that it must divide, naming the number to
    change, or a mesh of this number of `devices` that does."""
    for wrong in _undivided(layout, rules, sizes):
        size, over, shards = wrong
        fitting = None if devices is None else _fitting_mesh(layout, over, rules, sizes, devices)
        fitting = f"set {fitting or f'{describe_axes(over)} to one of {some_divisors(size.size)}'}"
        if size.paddable:
            fitting += f", or {size.key} to {math.ceil(size.size / shards) * shards}"
        raise InputError(f"{wrong}: {fitting}")


def _fitting_mesh(
    layout: Layout, axes: Iterable[str], rules: Rules, sizes: Sequence[ModelSize], devices: int
) -> str | None:
    """Return how to change a layout into one of all devices that divides the sizes, with the most shards over some
    axes; None where there is none."""
    used = [axis for axis, size in layout.items() if size > 1 or axis in rules.over("batch")[:2]]
    fitting = [other for other in factorings(devices, used) if divides(other, rules, sizes)]
    best = max(fitting, key=lambda other: (other.over(axes), -other["tensor"]), default=layout)
    return _changes(layout, best) or None


def _changes(one: Layout, other: Layout) -> str:
    """Return the keys and values by which a layout differs from one."""
    return " ".join(f"mesh.{axis}={size}" for axis, size in other.items() if size != one[axis])


def layouts(devices: int, rules: Rules, parameters: Collection[str] | None = None) -> Iterator[Layout]:
    """Yield the layouts of a number of devices over the `distinct_axes`, the innermost axis growing last."""
    return factorings(devices, distinct_axes(rules, parameters))


def distinct_axes(rules: Rules, parameters: Collection[str] | None = None) -> list[str]:
    """Return the mesh axes that shard something, and of those that shard the same logical axes, which are one axis by
    two names, the one that shards the fewest others. `parameters`: the logical axes of the model's parameters, where
    they are known."""
    absent = frozenset() if parameters is None else rules.without(parameters)
    duties = {axis: duty for axis in Layout() if (duty := rules.duties(axis) - absent)}
    named: dict[frozenset[str], str] = {}
    for axis, duty in sorted(duties.items(), key=lambda each: len(rules.duties(each[0]))):
        named.setdefault(duty, axis)
    return [axis for axis, duty in duties.items() if named[duty] == axis]


def neighbours(layout: Layout, axes: Collection[str]) -> Iterator[Layout]:
    """Yield the layouts of as many devices in which a prime factor of one axis has moved to another of these axes."""
    for one in axes:
        for prime in _prime_factors(layout[one]):
            for other in axes:
                if other != one:
                    yield layout.replace(**{one: layout[one] // prime, other: layout[other] * prime})


def _prime_factors(n: int) -> list[int]:
    """Return the primes that divide a number."""
    return [d for d in divisors(n) if len(divisors(d)) == 2]


def training_layout(mesh: MeshSection, devices: int, rules: Rules, sizes: Sequence[ModelSize]) -> Layout:
    """Return the layout of a step of training on a number of devices.

    Where an axis of the batch takes the devices that are left, and it is not the first, it has the most of them that
    divide the model; the first, over which gradients are summed once a step, has the others.

    Raises InputError where the mesh does not divide the devices.
    """
    layout, rest, first = mesh.layout(devices), _rest_of_batch(mesh, rules), rules.over("batch")[0]
    if rest is None:
        return layout
    candidates = (layout.replace(**{first: layout[rest] // n, rest: n}) for n in reversed(divisors(layout[rest])))
    return next((each for each in candidates if divides(each, rules, sizes)), layout)


def say_divided(mesh: MeshSection, layout: Layout, rules: Rules, sizes: Sequence[ModelSize]) -> str | None:
    """Return a line that says why a `training_layout` is another than the mesh gives; None where it is the same."""
    given = mesh.layout(layout.size)
    if given == layout:
        return None
    return f"{next(_undivided(given, rules, sizes))}: the mesh has {_changes(given, layout)}"


def inference_layout(mesh: MeshSection, devices: int, rules: Rules, fits: Callable[[Layout], bool]) -> Layout:
    """Return the layout of a step of inference on a number of devices.

    Where an axis of the batch would take the devices that are left, and it is not the first, they go to the first,
    over which no weight is sent. The axes that shard a layer have what is given, or else the fewest devices with which
    the layout `fits`; all of them where none does.

    Raises InputError where the mesh does not divide the devices.
    """
    layout, sizes, rest = mesh.layout(devices), mesh.sizes(), _rest_of_batch(mesh, rules)
    check_used(layout, rules)
    if rest is None:
        return layout
    given = {axis: size for axis, size in layout.items() if axis != rest and sizes[axis] != 1}
    free = [axis for axis in layout if axis in rules.of_layers and axis not in given]
    first = rules.over("batch")[0]
    candidates = [each.replace(**given) for each in factorings(devices // Layout(given).size, [first, *free])]
    free.sort(key=lambda axis: len(rules.duties(axis)))  # of those alike for a model, the plainest
    candidates.sort(key=lambda each: (each.over(free), [-each[axis] for axis in free]))
    return next(filter(fits, candidates), candidates[-1])


def check_used(layout: Layout, rules: Rules) -> None:
    """Raise InputError where a layout of inference has several devices along an axis that shards nothing."""
    if idle := [axis for axis, size in layout.items() if size > 1 and not rules.duties(axis)]:
        raise InputError(f"{describe_axes(idle)} = {layout.over(idle)} shards nothing in inference: set it to 1")


def _rest_of_batch(mesh: MeshSection, rules: Rules) -> str | None:
    """Return the axis of the batch that takes the devices that are left, if it is not the first, which has one."""
    first, *others = rules.over("batch")
    sizes = mesh.sizes()
    return next((axis for axis in others if sizes[axis] == ALL), None) if sizes[first] == 1 else None


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
