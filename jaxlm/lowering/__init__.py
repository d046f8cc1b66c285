"""Compile for chips that are not here: memory, collectives and kernels from XLA itself."""
