"""Markers for tests that compile programs for chips that are not here."""

import platform
import sys

import pytest

ELSEWHERE = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
