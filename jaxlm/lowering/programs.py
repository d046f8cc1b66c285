"""The steps that commands run, lowered for a mesh of devices that need not be here."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.config import Experiment
from jaxlm.costs.workload import Kind
from jaxlm.inference.cache import cache_shardings, empty_cache
from jaxlm.inference.config import Sampling
from jaxlm.inference.generate import programs
from jaxlm.models import tree as model_tree
from jaxlm.training.step import cast, jit_steps, make_steps


def lower(experiment: Experiment, kind: Kind, mesh: Mesh) -> jax.stages.Lowered:
    """The step that `jaxlm train` runs, or one of those that `jaxlm generate` runs: with its donated buffers, its
    shardings and its sampling, on `training.batch` sequences of `training.sequence` tokens in `training.dtype`.

    No array is made. A prefill fills a cache of just these tokens; a decoding step reads the last of them.
    """
    with jax.set_mesh(mesh):
        return {"train": _train, "prefill": _prefill, "decode": _decode}[kind](experiment, mesh)


def _train(experiment: Experiment, mesh: Mesh) -> jax.stages.Lowered:
    steps = make_steps(experiment.model, experiment.training, experiment.optimizer)
    state = _placed(jax.eval_shape(steps.init), steps.shardings(mesh))
    shape = experiment.training.batch, experiment.training.sequence
    batch = {name: _ids(shape, mesh) for name in ("tokens", "targets", "segments", "positions")}
    return jit_steps(steps, mesh).train.lower(state, batch)


def _prefill(experiment: Experiment, mesh: Mesh) -> jax.stages.Lowered:
    prefill, _, parameters, key = _inference(experiment, mesh)
    batch, sequence = experiment.training.batch, experiment.training.sequence
    return prefill.lower(parameters, _ids((batch, sequence), mesh), _ids((batch,), mesh), key)


def _decode(experiment: Experiment, mesh: Mesh) -> jax.stages.Lowered:
    _, decode, parameters, key = _inference(experiment, mesh)
    model, batch, size = experiment.model, experiment.training.batch, experiment.training.sequence
    empty = jax.eval_shape(lambda: empty_cache(model, batch, size, jnp.dtype(experiment.training.dtype)))
    cache = _placed(empty, cache_shardings(model, batch, size, mesh))
    return decode.lower(parameters, _ids((batch,), mesh), cache, key)


def _inference(experiment: Experiment, mesh: Mesh) -> tuple:
    """The programs of a generation, the parameters in the dtype to compute in, and a key."""
    model, training = experiment.model, experiment.training
    dtype = jnp.dtype(training.dtype)
    graph, tree = model_tree.abstract(model)
    prefill, decode = programs(graph, model, training.batch, training.sequence, dtype, mesh, Sampling(), None)
    parameters = jax.eval_shape(lambda tree: cast(tree, dtype), model_tree.shapes(tree))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return prefill, decode, _placed(parameters, model_tree.shardings(tree, mesh)), key


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _ids(shape: tuple[int, ...], mesh: Mesh) -> jax.ShapeDtypeStruct:
    """int32 rows of a batch, as the loader lays them on the mesh."""
    lies = sharding.sharding(("batch", "sequence")[: len(shape)], shape, mesh)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=lies)
