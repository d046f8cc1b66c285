"""Local SGD with an outer optimizer (DiLoCo, Douillard et al. 2023, arXiv:2311.08105, algorithm 1).

Each replica, a shard of the batch over `Rules.replicas`, has its own parameters and optimizer state, and trains by
itself. Every period the mean of their parameters moves the outer parameters, from which all go on. Within a period no
gradient crosses the axes of replicas, only the numbers of the metrics.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.models import tree as model_tree
from jaxlm.models.tree import Tree
from jaxlm.parallel.partition import using_rules
from jaxlm.parallel.rules import TRAIN
from jaxlm.training.config import LocalSGDConfig, OptimizerConfig
from jaxlm.training.groups import Rule, rules
from jaxlm.training.objectives import Batch
from jaxlm.training.state import LocalState, TrainState

# Under which each replica traces its step: the axes of replicas are not there.
_OWN = TRAIN.without_mesh_axes(TRAIN.replicas)


def stacked(tree: Any, replicas: int) -> Any:
    """Return a tree whose arrays [R, …] are a copy for each replica."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (replicas, *x.shape)), tree)


def stacked_shardings(shardings: Any, mesh: Mesh) -> Any:
    """Return the shardings of arrays [R, …], of those of one replica."""
    return jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(TRAIN.replicas, *s.spec)), shardings)


def train(
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]], state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Return the next state and the metrics of a step of each replica with its own rows. `step` gives those of one
    replica, with `metrics` over all."""

    def local(own: tuple, shared: TrainState, batch: Batch) -> tuple[tuple, TrainState, dict[str, jax.Array]]:
        parameters, working, moments = jax.tree.map(lambda x: x[0], own)
        with using_rules(_OWN):
            after, measured = step(shared._replace(parameters=parameters, working=working, optimizer=moments), batch)
        own = jax.tree.map(lambda x: x[None], (after.parameters, after.working, after.optimizer))
        return own, after._replace(parameters={}, working=None, optimizer=(), base={}), measured

    each, whole = PartitionSpec(TRAIN.replicas), PartitionSpec()
    # check_vma=False: interpreted kernels know of no other way, and the parameters of each replica are its own.
    on_each = jax.shard_map(
        local,
        in_specs=(each, whole, each),
        out_specs=(each, whole, whole),
        axis_names={*TRAIN.replicas},
        check_vma=False,
    )
    own = state.local.parameters, state.working, state.optimizer
    shared = state._replace(parameters={}, working=None, optimizer=(), local=None)
    (parameters, working, moments), after, measured = on_each(own, shared, batch)
    local_state = state.local._replace(parameters=parameters)
    kept = {"parameters": state.parameters, "base": state.base, "local": local_state}
    return after._replace(working=working, optimizer=moments, **kept), measured


def metrics(
    means: dict[str, jax.Array], sums: dict[str, jax.Array], count: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the metrics of all rows in a `train`: means over what the objective counts, `count` in those of this
    replica, and sums. `grad_norm` is the mean of the replicas'."""
    weights = {name: 1.0 if name == "grad_norm" else count.astype(jnp.float32) for name in means}
    weighted = {name: weights[name] * mean for name, mean in means.items()}
    totals, whole, sums = jax.lax.psum((weighted, weights, sums), TRAIN.replicas)
    return {name: total / jnp.maximum(whole[name], 1.0) for name, total in totals.items()}, sums


def replica_index() -> jax.Array:
    """Return the index of the replica in a `train`, int32 []."""
    return jax.lax.axis_index(TRAIN.replicas)


def moved(
    settings: LocalSGDConfig, optimizer: OptimizerConfig, tree: nnx.State, parameters: Tree, local: LocalState
) -> tuple[Tree, Tree]:
    """Return the next outer parameters and momentum: a step of Nesterov's momentum against the mean of what replicas
    have moved by. State that no gradient moves is the mean of the replicas'; what is frozen stays."""
    rate, decay = settings.outer_learning_rate, settings.outer_momentum

    def of(rule: Rule, x: jax.Array, each_R: jax.Array, m: jax.Array, is_state: bool) -> tuple[jax.Array, jax.Array]:
        mean = jnp.mean(each_R, axis=0)
        if not rule.scale:
            return (mean if is_state else x), m
        gradient = x - mean
        m = decay * m + gradient
        return x - rate * (gradient + decay * m), m

    states = jax.tree.map(lambda d: d.is_state, model_tree.dimensions(tree))
    pairs = jax.tree.map(of, rules(optimizer, tree), parameters, local.parameters, local.momentum, states)
    return tuple(jax.tree.map(lambda _, pair, i=i: pair[i], parameters, pairs) for i in range(2))
