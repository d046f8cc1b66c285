"""Launching, choice of implementation, target chips, tuning, argument checks and interpretation of kernels."""

from kernels_pallas.core.interpretation import interpreted

__all__ = ["interpreted"]
