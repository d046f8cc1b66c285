"""Bounds of a model's size for a first check, without counting it. Imports no JAX."""

from jaxlm.models.config import ModelConfig


def parameters_at_most(model: ModelConfig) -> int:
    """Return more parameters than a model of usual proportions has."""
    return model.d_model * (model.vocab_size * 2 + model.num_layers * (8 * model.d_model + 3 * _d_ff(model)))


def values_per_token_at_most(model: ModelConfig, sequence: int) -> int:
    """Return more numbers than a training step of such a model holds for each token of sequences of this length."""
    heads = max(getattr(block.attention, "num_heads", 1) for _, block in model.entries)
    layer = 32 * model.d_model + 8 * _d_ff(model) + 4 * heads * sequence
    return model.num_layers * layer + 4 * model.vocab_size


def _d_ff(model: ModelConfig) -> int:
    return max(getattr(block.feed_forward, "d_ff", 1) for _, block in model.entries)
