"""Language models in JAX, with every cost counted before it is paid."""

__version__ = "0.1.0"
