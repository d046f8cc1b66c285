"""The steps that commands run, with abstract arguments, for a mesh of devices that need not be present."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import config
from jaxlm.config import Experiment
from jaxlm.inference import steps
from jaxlm.inference.cache import DenseCache, cache_shardings, empty_cache
from jaxlm.inference.requests import Sampling
from jaxlm.inference.sampling import RowSampling, row_sampling, sample
from jaxlm.models import tree as model_tree
from jaxlm.models.kernels import using_kernels
from jaxlm.models.tree import Tree
from jaxlm.parallel.partition import named_sharding, replicated, using_rules
from jaxlm.parallel.rules import DECODE, PREFILL, RULES, TRAIN, Kind, Rules
from jaxlm.training.step import TrainStep


@dataclass(frozen=True)
class Step:
    """A jitted function on a mesh, and the shapes and shardings of its arguments; no array is created."""

    function: Any
    arguments: tuple
    mesh: Mesh

    def trace(self) -> jax.stages.Traced:
        with jax.set_mesh(self.mesh):
            return self.function.trace(*self.arguments)

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments on one device."""

        def size(x: jax.ShapeDtypeStruct) -> int:
            shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
            return math.prod(shape) * x.dtype.itemsize

        return sum(size(x) for x in jax.tree.leaves(self.arguments))


def step(experiment: Experiment, kind: Kind, mesh: Mesh) -> Step:
    """Return the step of `jaxlm train`, or one that reads prompts or a token of each sequence with a dense cache and
    draws the next, with its donation and shardings.

    It has the sequences and tokens of `jaxlm.config.sizes`, in `execution.dtype`. Prefill fills a cache of exactly
    these tokens; a decoding step reads the last token.
    """
    if kind == "train":
        return Step(*_train(experiment, mesh), mesh)
    model, execution = experiment.model, experiment.execution
    dtype = jnp.dtype(execution.dtype)
    batch, sequence = config.sizes(experiment, kind)
    graph, tree = model_tree.abstract(model)
    sizes = model, batch, sequence
    cache_placement = cache_shardings(*sizes, mesh)
    parameters = model_tree.placed(model_tree.shapes(tree, dtype), model_tree.shardings(tree, mesh, RULES[kind]))
    how = jax.eval_shape(lambda: row_sampling([Sampling()] * batch, seed=0))
    one = _ids((batch,), mesh, RULES[kind])
    known = jax.ShapeDtypeStruct((model.vocab_size,), jnp.bool, sharding=replicated(mesh))
    rows = named_sharding(("batch",), (batch,), mesh, DECODE)

    @using_rules(PREFILL)
    @using_kernels(execution.kernels)
    def prefill(parameters: Tree, tokens: jax.Array, length: jax.Array, how: RowSampling, known: jax.Array) -> tuple:
        logits, cache = steps.prefill(graph, parameters, tokens, length, empty_cache(*sizes, dtype))
        return sample(logits, how, cache.length, known).token, cache

    @using_rules(DECODE)
    @using_kernels(execution.kernels)
    def decode(parameters: Tree, tokens: jax.Array, cache: DenseCache, how: RowSampling, known: jax.Array) -> tuple:
        logits, cache = steps.decode_step(graph, parameters, tokens, cache)
        return sample(logits, how, cache.length, known).token, cache

    if kind == "prefill":
        prompts = _ids((batch, sequence), mesh, RULES[kind])
        jitted = jax.jit(prefill, out_shardings=(rows, cache_placement))
        return Step(jitted, (parameters, prompts, one, how, known), mesh)
    length = np.full(batch, sequence, np.int32)
    with jax.set_mesh(mesh):
        filled = jax.eval_shape(lambda: empty_cache(*sizes, dtype).advance(length))
    cache = model_tree.placed(filled, cache_placement)
    jitted = jax.jit(decode, out_shardings=(rows, cache_placement), donate_argnums=2)
    return Step(jitted, (parameters, one, cache, how, known), mesh)


def _train(experiment: Experiment, mesh: Mesh) -> tuple[Any, tuple]:
    steps = TrainStep.of(experiment)
    state = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
    shape = experiment.training.batch, experiment.training.sequence
    batch = {name: _ids(shape, mesh, TRAIN) for name in ("tokens", "targets", "segments", "positions")}
    if experiment.dpo is not None:
        pairs = _ids((experiment.training.batch, 2), mesh, TRAIN)
        batch["reference"] = jax.ShapeDtypeStruct(pairs.shape, jnp.float32, sharding=pairs.sharding)
    return steps.jitted(mesh).train, (state, batch)


def _ids(shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> jax.ShapeDtypeStruct:
    """Return abstract int32 token ids, sharded over the mesh as the loader shards them."""
    placement = named_sharding(("batch", "sequence")[: len(shape)], shape, mesh, rules)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement)
