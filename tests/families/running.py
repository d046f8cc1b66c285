"""Published models of tests: their directories, and what they compute."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlm.families import safetensors
from jaxlm.families.safetensors import LazyTensor
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.positions import packed_causal_mask


def save(folder: Path, config: Mapping[str, object], weights: Mapping[str, np.ndarray]) -> Path:
    """Write a Hugging Face directory. Return it."""
    tensors = {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in weights.items()}
    safetensors.write(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def logits(model: ModelConfig, parameters: tree.Tree, tokens, positions=None) -> jax.Array:
    """Return the float32 logits [B, T, V] of tokens [B, T], under a mesh. Documents begin where positions restart."""
    graph, _ = tree.abstract(model)

    @jax.jit
    def run(parameters, tokens_BT, positions_BT):
        module = nnx.merge(graph, parameters)
        hidden_BTD, _, _ = module.hidden(tokens_BT, positions_BT, packed_causal_mask(positions_BT))
        return module.logits(hidden_BTD)

    tokens = jnp.asarray(tokens)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return run(parameters, tokens, jnp.asarray(positions))
