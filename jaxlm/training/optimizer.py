"""The optimizer, which reads from the abstract tree what each parameter is; from optax wherever that suffices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxlm.models import tree as model_tree
from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding, replicated
from jaxlm.parallel.rules import Rules
from jaxlm.training import adafactor, muon
from jaxlm.training.config import OptimizerConfig
from jaxlm.training.groups import Rule, rules
from jaxlm.training.optimizer_cost import OptimizerCost, moments
from jaxlm.training.promotion import promoting
from jaxlm.training.schedules import schedule

# Per kind: the direction of an update, from settings and dimensions, before decay and learning rate.
_DIRECTIONS: dict[str, Callable[[Any, Tree], optax.GradientTransformation]] = {
    "adamw": lambda s, _: optax.scale_by_adam(s.beta1, s.beta2, s.epsilon),
    "muon": muon.scale_by_muon_and_adam,
    "adafactor": lambda s, dimensions: adafactor.scale_by_adafactor(dimensions, s.decay_exponent, s.update_clip),
    "lion": lambda s, _: optax.scale_by_lion(s.beta1, s.beta2),
    "sgd": lambda s, _: optax.trace(s.momentum, s.nesterov),
}

# Per kind: the cost of a parameter's update, from settings, its dimensions, and a mesh's layout and rules.
_COSTS: dict[str, Callable[[Any, Dimensions, Layout, Rules], OptimizerCost]] = {
    "adamw": lambda s, d, layout, rules: moments(d, 2),
    "muon": muon.cost,
    "adafactor": lambda s, d, layout, rules: adafactor.cost(d),
    "lion": lambda s, d, layout, rules: moments(d, 1),
    "sgd": lambda s, d, layout, rules: moments(d, 1),
}


def cost(settings: OptimizerConfig, d: Dimensions, layout: Layout, rules: Rules) -> OptimizerCost:
    """Return what the optimizer declares for a parameter on a mesh of this layout."""
    return _COSTS[settings.kind](settings, d, layout, rules)


def optimizer(settings: OptimizerConfig, tree: nnx.State) -> optax.GradientTransformation:
    """Return the optimizer: clipping by global norm, its direction, decoupled weight decay and the learning rate.

    Raises InputError for a group whose pattern decides nothing.
    """
    dimensions = model_tree.dimensions(tree)
    direction = _DIRECTIONS[settings.kind](settings, dimensions)
    rate = schedule(settings.schedule, settings.learning_rate)
    transform = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.chain(direction, _decay_and_scale(settings, tree), optax.scale_by_learning_rate(rate)),
    )
    return optax.GradientTransformation(promoting(transform.init), promoting(transform.update))


def without_frozen(settings: OptimizerConfig, tree: nnx.State) -> Callable[[Tree], Tree]:
    """Return a function that zeroes the gradients of frozen parameters, so that XLA need not compute them."""
    ruled = rules(settings, tree)
    return lambda gradients: jax.tree.map(lambda r, g: g if r.scale else jnp.zeros_like(g), ruled, gradients)


def _decay_and_scale(settings: OptimizerConfig, tree: nnx.State) -> optax.GradientTransformation:
    """Return scale · (direction + weight_decay · parameter), with the scale and decay of each parameter."""
    adam_rate = getattr(settings, "adam_learning_rate", None)  # Muon's, for parameters that it does not orthogonalise
    own = {True: 1.0, False: 1.0 if adam_rate is None else adam_rate / settings.learning_rate}
    relative = jax.tree.map(lambda d: own[d.projection], model_tree.dimensions(tree))
    ruled = rules(settings, tree)

    def moved(r: Rule, relative: float, u: jax.Array, p: jax.Array) -> jax.Array:
        if not r.scale:
            return jnp.zeros_like(u)
        decayed = u + r.weight_decay * p if r.weight_decay else u
        scale = r.scale * relative
        return decayed if scale == 1.0 else scale * decayed

    transform = optax.stateless(lambda updates, parameters: jax.tree.map(moved, ruled, relative, updates, parameters))
    # The mask selects every parameter, so that the state, and a checkpoint, has the structure of optax.adamw's.
    return optax.masked(transform, True)


def state_shardings(transformation: optax.GradientTransformation, tree: nnx.State, mesh: Mesh) -> Any:
    """Return a sharding for each leaf of the optimizer's state.

    A leaf whose path ends in a parameter's path and that has its shape is sharded like the parameter. "inputs" and
    "outputs" below such a path are sharded like these dimensions of the parameter. Other leaves are replicated.
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
    """Return {path: (shape, sharding)} of the parameters, and of a matrix's state per input and per output."""
    places = {}
    for path, d in model_tree.paths(model_tree.dimensions(tree)).items():
        kept = {path: range(len(d.shape))}
        if d.inputs:
            kept |= {f"{path}/inputs": d.stack + d.inputs, f"{path}/outputs": d.stack + d.outputs}
        for name, axes in kept.items():
            part = tuple(d.shape[i] for i in axes)
            places[name] = part, named_sharding([d.axes[i] for i in axes], part, mesh)
    return places
