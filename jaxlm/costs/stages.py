"""The layers of a stage of a pipeline."""

import functools
from typing import NamedTuple

from flax import nnx

from jaxlm.core.errors import InputError
from jaxlm.models.config import ModelConfig
from jaxlm.models.layers import main_layers
from jaxlm.models.tree import abstract


class StageLayers(NamedTuple):
    """The layers that a device of a pipeline runs. `model`: one with these layers, and those outside of the stages.
    `slots`: of each stage, for a layer each. `idle`: slots of all stages together that have no layer. `path`: of the
    stack of the layers."""

    model: ModelConfig
    slots: int
    idle: int
    path: str = "layers"


@functools.lru_cache(maxsize=256)
def stage_layers(model: ModelConfig, stages: int) -> StageLayers:
    """Return the layers of each of several stages; without a pipeline they are all layers.

    Raises InputError for a model whose layers do not lie on stages.
    """
    if stages == 1:
        return StageLayers(model, model.num_layers, 0)
    groups = nnx.merge(*abstract(model)).groups
    name, layers = main_layers(groups)
    slots = -(-len(layers) // stages)
    of_stage = model.model_copy(update={"num_layers": model.num_layers - len(layers) + slots})
    if layers.stop != model.num_layers or of_stage.layers != model.layers[: of_stage.num_layers]:
        raise InputError("plans of a pipeline need a model whose last layers are those of the stages")
    path = "/".join(("layers", *[name] * (len(groups.stacks) > 1)))
    return StageLayers(of_stage, slots, stages * slots - len(layers), path)
