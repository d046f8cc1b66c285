"""Benchmarks: `python -m kernels_pallas.bench` needs jax alone, and compares with PyTorch where that is installed."""
