"""Launching, choice of implementation, target chips, tuning and argument checks of kernels."""
