"""Architectures: their configuration, Flax NNX modules and abstract trees."""
