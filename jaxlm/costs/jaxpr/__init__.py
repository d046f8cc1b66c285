"""What any JAX function costs, counted from its jaxpr."""
