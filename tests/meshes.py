"""Meshes and layouts of tests, by the sizes of their axes (data, fsdp, tensor)."""

from collections.abc import Sequence

import jax
import pytest
from jax.sharding import Mesh

from jaxlm.parallel.layout import AXES, Layout
from jaxlm.parallel.mesh import make_mesh


def layout(*sizes: int, **named: int) -> Layout:
    """Return the layout with these sizes of the outermost axes, or of named ones."""
    return Layout(dict(zip(AXES[: len(sizes)], sizes, strict=True)), **named)


def make(*sizes: int, devices: Sequence | None = None, **named: int) -> Mesh:
    """Return a mesh of this `layout`, on these devices or the first of all."""
    return make_mesh(layout(*sizes, **named), devices)


def have(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let commands that are called in this process find so many devices alone."""
    monkeypatch.setattr("jaxlm.parallel.devices.start", lambda wanted: jax.devices()[:count])
