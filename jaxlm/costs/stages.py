"""The layers of a stage of a pipeline."""

import functools
from typing import NamedTuple

from flax import nnx

from jaxlm.core.errors import InputError
from jaxlm.models.config import ModelConfig
from jaxlm.models.layers import main_layers
from jaxlm.models.tree import abstract
from jaxlm.parallel import ticks


class StageLayers(NamedTuple):
    """The layers that a device of a pipeline runs in a tick: those of one chunk. `model`: one with these layers,
    and those outside of the stages. `slots`: of each chunk, for a layer each. `idle`: slots of all stages together that
    have no layer. `exchanges`: the parts in which stages send one another matrices at the beginning of a step, a chunk
    each, and `moves`: the times that they move otherwise, before stages have those in their slots. `path`: of the stack
    of the layers."""

    model: ModelConfig
    slots: int
    idle: int
    exchanges: int = 0
    moves: int = 0
    path: str = "layers"


@functools.lru_cache(maxsize=256)
def stage_layers(model: ModelConfig, stages: int, rounds: int = 1) -> StageLayers:
    """Return the layers of a chunk, of which each of several stages has one for each round; without a pipeline they are
    all layers.

    Raises InputError for a model whose layers do not lie on stages.
    """
    if stages == 1:
        return StageLayers(model, model.num_layers, 0)
    groups = nnx.merge(*abstract(model)).groups
    name, layers = main_layers(groups)
    slots = -(-len(layers) // (stages * rounds))
    idle = stages * rounds * slots - len(layers)
    of_stage = model.model_copy(update={"num_layers": model.num_layers - len(layers) + slots})
    if layers.stop != model.num_layers or of_stage.layers != model.layers[: of_stage.num_layers]:
        raise InputError(
            "a pipeline needs layers of one structure that follow one another and are the last of the model: set "
            "mesh.pipeline to 1"
        )
    path = "/".join(("layers", *[name] * (len(groups.stacks) > 1)))
    # Layers that stages divide are stored on them, those of several rounds on others than run them; what is padded has
    # another dimension sharded before.
    sends = (any(source != to for source, to in move.pairs) for move in ticks.moves(stages, rounds))
    exchanges = sum(sends) if rounds > 1 and not idle else 0
    moves = 0 if not idle else 1 if len(layers) % stages else 2
    return StageLayers(of_stage, slots, idle, exchanges, moves, path)
