"""Measure beside what is counted: kernels and decoding on this machine, or a server under a load."""

from types import ModuleType


def parts() -> tuple[ModuleType, ...]:
    """Return the modules of what can be measured: other commands start without them."""
    from jaxlm.cli.bench import decode, kernels, serve

    return decode, kernels, serve
