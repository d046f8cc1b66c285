"""The optimizer, which reads from the abstract tree what each parameter is; from optax wherever that suffices."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxlm.core.registry import Registry
from jaxlm.models import tree as model_tree
from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding, replicated
from jaxlm.parallel.rules import Rules
from jaxlm.training import adafactor, muon
from jaxlm.training.config import (
    AdafactorConfig,
    AdamWConfig,
    AnyOptimizer,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
)
from jaxlm.training.groups import Rule, rules
from jaxlm.training.optimizer_cost import OptimizerCost, StateArray, UpdateCost
from jaxlm.training.promotion import promoting
from jaxlm.training.schedules import schedule

# From settings and the `Dimensions` of each parameter: the direction of an update, before decay and learning rate.
Direction = Callable[[Any, Tree], optax.GradientTransformation]
# From settings, the dimensions of a parameter, and a mesh's layout and rules.
DeclareUpdate = Callable[[Any, Dimensions, Layout, Rules], UpdateCost]


def _declare_nothing(settings: OptimizerConfig, d: Dimensions, layout: Layout, rules: Rules) -> UpdateCost:
    return UpdateCost()


_REGISTRY: Registry[tuple[Direction, DeclareUpdate]] = Registry(
    AnyOptimizer,
    OptimizerConfig,
    {
        AdamWConfig: (lambda s, _: optax.scale_by_adam(s.beta1, s.beta2, s.epsilon), _declare_nothing),
        MuonConfig: (muon.scale_by_muon_and_adam, muon.update_cost),
        AdafactorConfig: (
            lambda s, dimensions: adafactor.scale_by_adafactor(dimensions, s.decay_exponent, s.update_clip),
            _declare_nothing,
        ),
        LionConfig: (lambda s, _: optax.scale_by_lion(s.beta1, s.beta2), _declare_nothing),
        SGDConfig: (lambda s, _: optax.trace(s.momentum, s.nesterov), _declare_nothing),
    },
)
unregister = _REGISTRY.unregister


def register(section: type[OptimizerConfig], direction: Direction, declare: DeclareUpdate = _declare_nothing) -> None:
    """Let `kind` of [optimizer] select a direction of updates. Clipping, weight decay, groups, the schedule and the
    learning rate are applied as for any other.

    Args:
      section: its keys, with a `kind: Literal["NAME"] = "NAME"`.
      direction: returns a transformation of optax, such as `optax.scale_by_adam`, from (settings, dimensions): a
        section, and the `Dimensions` of each parameter as a tree.
      declare: returns the matrix products and the collectives of a parameter's update from (settings, dimensions,
        layout, rules); by default none. What the optimizer keeps is read from its state.

    Raises ValueError where it has no kind, where another section has its kind, or where it is no `OptimizerConfig`.
    """
    _REGISTRY.register(section, (direction, declare))


def costs(
    settings: OptimizerConfig, parameters: Mapping[str, Dimensions], layout: Layout, rules: Rules
) -> dict[str, OptimizerCost]:
    """Return the cost of an update of each parameter, by path, on a mesh of this layout."""
    direction, declare = _REGISTRY.of(settings)
    state = _kept(direction, settings, tuple(parameters.items()))
    return {path: OptimizerCost(*state[path], *declare(settings, d, layout, rules)) for path, d in parameters.items()}


@functools.lru_cache(maxsize=64)  # for every layout of a search
def _kept(
    direction: Direction, settings: Any, dimensions: tuple[tuple[str, Dimensions], ...]
) -> dict[str, tuple[tuple[StateArray, ...], int]]:
    """Return the arrays that are kept for each parameter, and bytes of others, of which its first one has all."""
    parameters = dict(dimensions)
    shapes = {path: jax.ShapeDtypeStruct(d.shape, jnp.float32) for path, d in parameters.items()}
    state = jax.eval_shape(promoting(direction(settings, parameters).init), shapes)
    kept: dict[str, list[StateArray]] = {path: [] for path in parameters}
    whole: Counter[str] = Counter()
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if (part := _part(keys, leaf, parameters)) is not None:
            kept[part.path].append(StateArray(part.dimensions, leaf.dtype.itemsize))
        elif leaf.ndim:  # no count of updates
            whole[next(iter(parameters))] += math.prod(leaf.shape) * leaf.dtype.itemsize
    return {path: (tuple(kept[path]), whole[path]) for path in parameters}


def optimizer(settings: OptimizerConfig, tree: nnx.State) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer: clipping by global norm, its direction, decoupled weight decay and the learning rate.

    `update` takes the gradients' `norm` where it is known already.

    Raises InputError for a group whose pattern decides nothing.
    """
    dimensions = model_tree.dimensions(tree)
    direction = _REGISTRY.of(settings)[0](settings, dimensions)
    rate = schedule(settings.schedule, settings.learning_rate)
    transform = optax.chain(
        _clipping(settings.clip_norm),
        optax.chain(direction, _decay_and_scale(settings, tree), optax.scale_by_learning_rate(rate)),
    )
    return optax.GradientTransformationExtraArgs(promoting(transform.init), promoting(transform.update))


def without_frozen(settings: OptimizerConfig, tree: nnx.State) -> Callable[[Tree], Tree]:
    """Return a function that zeroes the gradients of frozen parameters, so that XLA need not compute them."""
    ruled = rules(settings, tree)
    return lambda gradients: jax.tree.map(lambda r, g: g if r.scale else jnp.zeros_like(g), ruled, gradients)


def _clipping(most: float) -> optax.GradientTransformationExtraArgs:
    """Return what scales gradients down to a global norm of at most `most` (arXiv:1211.5063, section 3.2).

    One factor for all is multiplied where gradients are read; optax's division writes every gradient once more.
    """

    def clipped(
        gradients: Tree, state: Any, parameters: Tree | None = None, *, norm: jax.Array | None = None, **others: Any
    ) -> tuple[Tree, Any]:
        factor = jnp.minimum(1.0, most / (optax.tree.norm(gradients) if norm is None else norm))
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, clipped)


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
    """Return a sharding for each leaf of the optimizer's state: of what has dimensions of a parameter (`_part`) as
    these; other leaves are replicated."""
    parameters = model_tree.paths(model_tree.dimensions(tree))

    def place(keys: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if (part := _part(keys, leaf, parameters)) is None:
            return replicated(mesh)
        axes = parameters[part.path].axes
        return named_sharding([axes[i] for i in part.dimensions], leaf.shape, mesh)

    state = jax.eval_shape(transformation.init, model_tree.shapes(tree))
    return jax.tree_util.tree_map_with_path(place, state)


class _ParameterPart(NamedTuple):
    """The parameter that an array of the state belongs to, and the dimensions of it that the array has."""

    path: str
    dimensions: tuple[int, ...]


def _part(keys: tuple, leaf: jax.ShapeDtypeStruct, parameters: Mapping[str, Dimensions]) -> _ParameterPart | None:
    """Return what of a parameter an array of the state has, by its path there; None for others.

    Its path ends in the parameter's, and it has the parameter's shape; or below that path in "inputs" or "outputs", and
    it has the shape of these dimensions of a matrix.
    """
    names = jax.tree_util.keystr(keys, simple=True, separator="/").split("/")
    for start in range(len(names)):
        path, last = "/".join(names[start:]), ""
        if path not in parameters:
            path, last = "/".join(names[start:-1]), names[-1]
        if (d := parameters.get(path)) is None:
            continue
        sides = {"": tuple(range(len(d.shape))), "inputs": d.stack + d.inputs, "outputs": d.stack + d.outputs}
        dimensions = sides.get(last, ())
        if (not last or d.inputs) and tuple(d.shape[i] for i in dimensions) == leaf.shape and leaf.ndim:
            return _ParameterPart(path, dimensions)
    return None
