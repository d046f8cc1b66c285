"""Compile for absent chips: memory, collectives and kernels from XLA itself."""
