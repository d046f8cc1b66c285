"""The parameters of a model, and which of them multiply each token."""

import functools
import math

from jaxlm.models import tree
from jaxlm.models.config import ModelConfig


@functools.lru_cache(maxsize=256)
def parameters(model: ModelConfig) -> dict[str, tree.Dimensions]:
    """The dimensions of each parameter, by path."""
    return tree.paths(tree.dimensions(tree.abstract(model)[1]))


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply each token: all matrices but those that are only looked up."""
    return sum(math.prod(d.shape) for path, d in parameters(model).items() if multiplies(model, path, d))


def multiplies(model: ModelConfig, path: str, d: tree.Dimensions) -> bool:
    looked_up = path == "positions" or (path == "embedding" and not model.tied_embeddings)
    return bool(d.inputs) and not looked_up
