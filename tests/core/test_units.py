"""Formatting of figures: the unit of each size, and rounding."""

import pytest

from jaxlm.core import units
from jaxlm.core.units import GIB


@pytest.mark.parametrize(
    "value, shown",
    [(1234.0, "1.23e+03 s"), (1.0, "1 s"), (0.0246, "24.6 ms"), (1e-6, "1 µs"), (25e-9, "25 ns"), (0.0, "0 ns")],
)
def test_seconds(value, shown):
    assert units.seconds(value) == shown


@pytest.mark.parametrize("size, shown", [(GIB, "1.00 GiB"), (GIB // 2, "0.50 GiB"), (GIB // 4, "256 MiB")])
def test_memory(size, shown):
    assert units.memory(size) == shown


@pytest.mark.parametrize(
    "value, unit, shown",
    [(3.35e12, "B/s", "3.35 TB/s"), (700, "W", "700 W"), (2e-6, "s", "2 µs"), (2e16, "B", "20,000 TB")],
)
def test_prefixes(value, unit, shown):
    assert units.with_prefix(value, unit) == shown


def test_what_is_not_known_is_a_dash():
    assert units.or_dash(None, units.gib) == "–" and units.or_dash(3 * GIB, units.gib) == "3.00"
