"""The parameters of a model, which of them multiply each token, and how far back their gradients go."""

import functools
import math
from collections.abc import Set
from enum import IntEnum

from jaxlm.costs.paper import abstract
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig


@functools.lru_cache(maxsize=256)
def parameters(model: ModelConfig) -> dict[str, tree.Dimensions]:
    """The dimensions of each parameter, by path."""
    return tree.paths(tree.dimensions(abstract(model)[1]))


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply each token: all matrices but those that are only looked up."""
    return sum(math.prod(d.shape) for path, d in parameters(model).items() if multiplies(model, path, d))


def multiplies(model: ModelConfig, path: str, d: tree.Dimensions) -> bool:
    """Return whether the parameter at a path multiplies each token: it is a matrix and not only looked up."""
    looked_up = path == "positions" or (path == "embedding" and not model.tied_embeddings)
    return bool(d.inputs) and not looked_up


class ModelPart(IntEnum):
    """The parts of a model in the order of its forward pass; NOTHING comes after the last."""

    LOOK_UP = 0
    LAYERS = 1
    FINAL_NORM = 2
    UNEMBEDDING = 3
    NOTHING = 4


@functools.lru_cache(maxsize=256)
def goes_back_to(model: ModelConfig, frozen: Set[str]) -> ModelPart:
    """The first part in which something trains: to the end of the model gradients go back that far. Layers are alike:
    with one matrix of them, gradients go through all."""
    return min((_part(path) for path in parameters(model) if path not in frozen), default=ModelPart.NOTHING)


def _part(path: str) -> ModelPart:
    if path.startswith("layers/"):
        return ModelPart.LAYERS
    if path.startswith("final_norm/"):
        return ModelPart.FINAL_NORM
    return ModelPart.UNEMBEDDING if path == "unembedding" else ModelPart.LOOK_UP
