"""Benchmarks: `python -m kernels_pallas.bench` needs only jax, and compares with PyTorch where it is installed."""
