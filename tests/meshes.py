"""Meshes and layouts of tests, by the sizes of their axes (data, fsdp, tensor)."""

from collections.abc import Sequence

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxlm.parallel.layout import Layout
from jaxlm.parallel.mesh import make_mesh


def layout(*sizes: int, **named: int) -> Layout:
    """Return the layout with these sizes of data, fsdp and tensor, or of named axes."""
    return Layout(dict(zip(("data", "fsdp", "tensor"), sizes, strict=False)), **named)


def make(*sizes: int, devices: Sequence | None = None, **named: int) -> Mesh:
    """Return a mesh of this `layout`, on these devices or the first of all."""
    return make_mesh(layout(*sizes, **named), devices)


def abstract(*sizes: int, device: AbstractDevice | None = None, **named: int) -> AbstractMesh:
    """Return the abstract mesh of this `layout`, of such devices."""
    of = layout(*sizes, **named)
    return AbstractMesh(tuple(of.values()), tuple(of), (AxisType.Auto,) * len(of), abstract_device=device)


def have(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let commands that are called in this process find so many devices alone."""
    monkeypatch.setattr("jaxlm.parallel.devices.start", lambda wanted: jax.devices()[:count])


def as_users_run(function):
    """Return a function that is compiled for one CPU with fused multiply-adds, as users' programs are: the suite's
    machine code is made quickly, without."""
    program = jax.jit(function, compiler_options={"xla_backend_optimization_level": 1})

    def run(*operands):
        with jax.set_mesh(make()):
            return program(*operands)

    return run
