"""The optimizer and its learning-rate schedule, from optax, told by the abstract tree what it decays and shards."""

from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.models import tree as model_tree
from jaxlm.training.config import AdamWConfig, CosineSchedule


def schedule(settings: CosineSchedule, peak: float) -> optax.Schedule:
    """Learning rate as a function of the number of updates made so far."""
    warmup = optax.linear_schedule(0.0, peak, settings.warmup_steps)
    # A run that ends inside its warmup leaves nothing to decay over.
    decay = max(settings.decay_steps - settings.warmup_steps, 1)
    cosine = optax.cosine_decay_schedule(peak, decay, alpha=settings.final_fraction)
    return optax.join_schedules([warmup, cosine], [settings.warmup_steps])


def optimizer(settings: AdamWConfig, tree: nnx.State) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW that decays the matrices of this abstract tree."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            schedule(settings.schedule, settings.learning_rate),
            b1=settings.beta1,
            b2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=model_tree.matrices(tree),
        ),
    )


def state_shardings(transformation: optax.GradientTransformation, tree: nnx.State, mesh: Mesh) -> Any:
    """A sharding per leaf of the optimizer's state.

    A leaf whose path ends in a parameter's path and that has its shape lies as that parameter does; the others
    are replicated.
    """
    shapes = model_tree.paths(model_tree.shapes(tree))
    placed = model_tree.paths(model_tree.shardings(tree, mesh))

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
        keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        for start in range(len(keys)):
            name = "/".join(keys[start:])
            if name in shapes and shapes[name].shape == leaf.shape:
                return placed[name]
        return sharding.replicated(mesh)

    state = jax.eval_shape(transformation.init, model_tree.shapes(tree))
    return jax.tree_util.tree_map_with_path(place, state)
