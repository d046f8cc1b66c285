"""Random adapters of a model."""

import jax
import numpy as np

from jaxlm.inference.adapters import NamedAdapter
from jaxlm.models import tree


def trained(model, lora, seed=0, scale=0.3):
    """Return adapters as a run saves them, of numbers of this standard deviation."""
    declared, _ = tree.trained(tree.abstract(model, lora)[1])
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: scale * draw.standard_normal(x.shape, np.float32), tree.shapes(declared))


def adapter(name, model, lora, seed=0, scale=0.3):
    """Return the same under a name, for an engine."""
    leaves = tree.paths(trained(model, lora, seed, scale))
    paths = [path.removesuffix("/a") for path in leaves if path.endswith("/a")]
    return NamedAdapter(name, {path: (leaves[f"{path}/a"], lora.scale * leaves[f"{path}/b"]) for path in paths})
