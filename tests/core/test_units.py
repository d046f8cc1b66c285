"""Formatting of figures: the unit of each size, and rounding."""

import pytest

from jaxlm.core import units
from jaxlm.core.units import GIB


@pytest.mark.parametrize(
    "value, shown",
    [
        (54 * 86400.0, "54 days"),
        (33.9 * 3600, "33.9 h"),
        (7200.0, "2 h"),
        (1234.0, "20.6 min"),
        (119.0, "119 s"),
        (1.0, "1 s"),
        (0.9996, "1 s"),
        (0.0246, "24.6 ms"),
        (1e-6, "1 µs"),
        (25e-9, "25 ns"),
        (0.0, "0 s"),
    ],  # fmt: skip
)
def test_seconds(value, shown):
    assert units.seconds(value) == shown


@pytest.mark.parametrize(
    "size, shown",
    [
        (959_640 * GIB, "937.15 TiB"), (1024 * GIB, "1.00 TiB"), (GIB, "1.00 GiB"), (GIB // 2, "0.50 GiB"),
        (GIB // 4, "256 MiB"), (2**19, "512 KiB"), (3000, "3 KiB"), (12, "12 B"), (0, "0 B"),
    ],
)  # fmt: skip
def test_memory(size, shown):
    assert units.memory(size) == shown


@pytest.mark.parametrize(
    "value, unit, shown",
    [
        (3.35e12, "B/s", "3.35 TB/s"),
        (700, "W", "700 W"),
        (2e-6, "s", "2 µs"),
        (2e16, "B", "20,000 TB"),
        (0, "B", "0 B"),
    ],
)
def test_prefixes(value, unit, shown):
    assert units.with_prefix(value, unit) == shown


def test_a_small_file_is_not_of_no_size():
    assert [units.size(size) for size in (0, 812, 40_500, 1_200_000)] == ["0 B", "812 B", "40.5 kB", "1.2 MB"]


def test_what_is_not_known_is_a_dash():
    assert units.or_dash(None, units.gib) == "–" and units.or_dash(3 * GIB, units.gib) == "3.00"


def test_a_time_is_read_in_its_unit():
    read = [units.parse_seconds(text) for text in ("0.5", ".5", "500ms", "2 min", "12h", "30d")]
    assert read == pytest.approx([0.5, 0.5, 0.5, 120, 43_200, 2_592_000])
    for text in ("", "0", "-1", "5 years", "1e3", "h"):
        with pytest.raises(ValueError, match="must be a time such as"):
            units.parse_seconds(text)
