"""The programs that commands run, with abstract operands, for a mesh of devices that need not be present."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError
from jaxlm.costs.draft_steps import draft_reading
from jaxlm.costs.workload import Workload
from jaxlm.inference.cache_memory import CacheSize, most_pages
from jaxlm.inference.draft_model import draft_cache, draft_programs
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.settings import EngineSettings, Speculation
from jaxlm.models import tree as model_tree
from jaxlm.parallel.batches import PER_TOKEN, axes_of
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding
from jaxlm.parallel.program import MeshProgram
from jaxlm.parallel.rules import TRAIN, Kind
from jaxlm.training.step import TrainStep


class StepPrograms(NamedTuple):
    """The programs of one step. Training has one program; the engine has its step and the draw after the step, and a
    draft model beside them its own step of the same rows and the proposal of drafts."""

    step: MeshProgram
    draw: MeshProgram | None = None
    read: MeshProgram | None = None
    propose: MeshProgram | None = None


def step_programs(experiment: Experiment, kind: Kind, mesh: Mesh) -> StepPrograms:
    """Return the step of `jaxlm train`, with its donation and shardings, or the programs of the engine's largest step
    of the workload (`Workload.largest_step`), whose cache has the pages that the workload's sequences need.

    Raises InputError for compiler options that XLA refuses, or of a step that does not train.
    """
    if kind == "train":
        return StepPrograms(_train(experiment, mesh))
    if experiment.execution.compiler_options:
        raise InputError(
            "execution.compiler_options are of training alone: give execution.compiler_options={} for the engine"
        )
    work = Workload.of(experiment, Layout(mesh.shape), kind)
    speculation = Speculation.parse(experiment.inference.speculate) if work.drafts else None
    settings = EngineSettings(
        slots=work.batch,
        cache_dtype=work.cache_dtype,
        page=work.page,
        chunk_tokens=work.chunk_tokens,
        speculation=speculation,
        context=work.sequence,
    )
    dtype, kernels = jnp.dtype(work.dtype), experiment.execution.kernels
    quantized = experiment.execution.quantization
    engine = EnginePrograms.of(experiment.model, mesh, dtype, settings, kernels, quantized)
    counts = (work.slots * most_pages(work.sequence, window, work.page) + 1 for window in engine.layout.groups)
    shape = work.without_drafts().largest_step().engine_steps.shape
    cache = CacheSize(work.sequence, tuple(counts))
    programs = StepPrograms(engine.step(shape, cache), engine.draw(shape.decode))
    if work.draft_model is None:
        return programs
    drafter = draft_programs(engine, work.draft_model.model, draft_reading(work).execution.quantization)
    cache = draft_cache(cache, drafter, engine)
    proposal = drafter.proposal(min(shape.decode, drafter.slots), cache)
    return programs._replace(read=drafter.step(shape._replace(scores=False), cache), propose=proposal)


def _train(experiment: Experiment, mesh: Mesh) -> MeshProgram:
    steps = TrainStep.of(experiment, mesh)
    state = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
    shape = experiment.training.batch, experiment.training.sequence
    batch = {name: _placed(name, shape, jnp.int32, mesh) for name in PER_TOKEN}
    if experiment.dpo is not None:
        batch["reference"] = _placed("reference", (experiment.training.batch, 2), jnp.float32, mesh)
    return MeshProgram(steps.jitted(mesh).train, (state, batch), mesh)


def _placed(name: str, shape: tuple[int, int], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return an abstract array of a batch, sharded over the mesh as the loader shards it."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(axes_of(name), shape, mesh, TRAIN))
