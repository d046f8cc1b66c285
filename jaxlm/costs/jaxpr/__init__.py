"""The cost of any JAX function, counted from its jaxpr."""
