"""The optimizer, told by the abstract tree what each parameter is; from optax where that asks for no more."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxlm.models import tree as model_tree
from jaxlm.models.tree import Tree
from jaxlm.parallel.partition import named_sharding, replicated
from jaxlm.training.adafactor import scale_by_adafactor
from jaxlm.training.config import OptimizerConfig
from jaxlm.training.groups import Rule, rules
from jaxlm.training.muon import scale_by_muon_and_adam
from jaxlm.training.schedules import schedule

# Per kind: the direction in which the settings move the parameters of these dimensions, before decay and rate.
_DIRECTIONS: dict[str, Callable[[Any, Tree], optax.GradientTransformation]] = {
    "adamw": lambda s, _: optax.scale_by_adam(s.beta1, s.beta2, s.epsilon),
    "muon": scale_by_muon_and_adam,
    "adafactor": lambda s, dimensions: scale_by_adafactor(dimensions, s.decay_exponent, s.update_clip),
    "lion": lambda s, _: optax.scale_by_lion(s.beta1, s.beta2),
    "sgd": lambda s, _: optax.trace(s.momentum, s.nesterov),
}


def optimizer(settings: OptimizerConfig, tree: nnx.State) -> optax.GradientTransformation:
    """Clipping by global norm, the direction of this kind, decoupled weight decay and the learning rate.

    Raises InputError where a group's pattern decides nothing.
    """
    dimensions = model_tree.dimensions(tree)
    direction = _DIRECTIONS[settings.kind](settings, dimensions)
    rate = schedule(settings.schedule, settings.learning_rate)
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.chain(direction, _decay_and_scale(settings, tree), optax.scale_by_learning_rate(rate)),
    )


def without_frozen(settings: OptimizerConfig, tree: nnx.State) -> Callable[[Tree], Tree]:
    """A function of gradients that makes those of frozen parameters zero, so that XLA need not compute them."""
    ruled = rules(settings, tree)
    return lambda gradients: jax.tree.map(lambda r, g: g if r.scale else jnp.zeros_like(g), ruled, gradients)


def _decay_and_scale(settings: OptimizerConfig, tree: nnx.State) -> optax.GradientTransformation:
    """scale · (direction + weight_decay · parameter), with each parameter's own."""
    aside = getattr(settings, "adam_learning_rate", None)  # Muon's, for what it does not orthogonalise
    own = {True: 1.0, False: 1.0 if aside is None else aside / settings.learning_rate}
    relative = jax.tree.map(lambda d: own[d.projection], model_tree.dimensions(tree))
    ruled = rules(settings, tree)

    def moved(r: Rule, relative: float, u: jax.Array, p: jax.Array) -> jax.Array:
        if not r.scale:
            return jnp.zeros_like(u)
        decayed = u + r.weight_decay * p if r.weight_decay else u
        scale = r.scale * relative
        return decayed if scale == 1.0 else scale * decayed

    transform = optax.stateless(lambda updates, parameters: jax.tree.map(moved, ruled, relative, updates, parameters))
    # Of all parameters, masked nonetheless: the state then has the structure of optax.adamw's, and so of checkpoints.
    return optax.masked(transform, True)


def state_shardings(transformation: optax.GradientTransformation, tree: nnx.State, mesh: Mesh) -> Any:
    """A sharding per leaf of the optimizer's state.

    A leaf whose path ends in a parameter's path and that has its shape lies as that parameter does; behind that path,
    "inputs" and "outputs" lie as those dimensions of it do. The others are replicated.
    """
    places = _places(tree, mesh)

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        for start in range(len(keys)):
            shape, placement = places.get("/".join(keys[start:]), (None, None))
            if shape == leaf.shape:
                return placement
        return replicated(mesh)

    state = jax.eval_shape(transformation.init, model_tree.shapes(tree))
    return jax.tree_util.tree_map_with_path(place, state)


def _places(tree: nnx.State, mesh: Mesh) -> dict[str, tuple[tuple[int, ...], NamedSharding]]:
    """{path: (shape, sharding)} of the parameters and of what a matrix keeps per input and per output."""
    places = {}
    for path, d in model_tree.paths(model_tree.dimensions(tree)).items():
        kept = {path: range(len(d.shape))}
        if d.inputs:
            kept |= {f"{path}/inputs": d.stack + d.inputs, f"{path}/outputs": d.stack + d.outputs}
        for name, axes in kept.items():
            part = tuple(d.shape[i] for i in axes)
            places[name] = part, named_sharding([d.axes[i] for i in axes], part, mesh)
    return places
