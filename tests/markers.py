"""Where programs for chips that are not here can be compiled."""

import platform
import sys

import pytest

ELSEWHERE = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
