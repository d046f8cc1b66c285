"""The memory of a step under a stack: its pipeline, its optimizer's state, and weights and caches of fewer bytes."""

from dataclasses import replace

from jaxlm.costs import local_shapes
from jaxlm.costs.counted.cache import kv_cache
from jaxlm.costs.counted.drawing import slots_bytes
from jaxlm.costs.counted.memory import Memory, memory, trained, updated
from jaxlm.costs.draft_steps import draft_drawing, draft_reading
from jaxlm.costs.stack import Stack
from jaxlm.costs.workload import Workload


def first_stage(work: Workload, stack: Stack) -> Workload:
    """Return the workload of the layers of a pipeline's first stage, which has as many as any; without a pipeline the
    workload itself."""
    if stack.pipeline.stages == 1:
        return work
    layers = -(-work.model.num_layers // stack.pipeline.stages)
    return replace(work, model=work.model.model_copy(update={"num_layers": layers}))


def stack_memory(work: Workload, stack: Stack) -> Memory:
    """Return the memory of a step on one device, in a pipeline of the first stage, which keeps the activations of as
    many microbatches as there are stages."""
    if work.drafts:
        return _with_drafts(work, stack)
    stages, work = stack.pipeline.stages, first_stage(work, stack)
    once = memory(work)
    if stages > 1:
        once = once._replace(activations=once.activations * min(stages, work.microbatches))
    if work.kind != "train":
        return _of_inference(once, work, stack)
    return _with_state(once, work, stack)


def least_memory(work: Workload, stack: Stack) -> Memory:
    """Return the memory that a training step needs at least, whatever its microbatches and rematerialisation."""
    work = replace(first_stage(work, stack), microbatches=1)
    return _with_state(updated(work), work, stack)


def _with_drafts(work: Workload, stack: Stack) -> Memory:
    """Return the memory of a decoding step whose drafts are rows, over pages and slots of the sequences alone. A draft
    model's weights and pages are there too; its programs and the engine's run one after the other."""
    rows, cache = stack_memory(work.without_drafts(), stack), kv_cache(work) * stack.cache_share(work.itemsize)
    rows = rows._replace(kv_cache=round(cache), slots=slots_bytes(work))
    if work.draft_model is None:
        return rows
    drafting = [stack_memory(each, stack) for each in (draft_reading(work), draft_drawing(work))]
    most = max((rows, *drafting), key=lambda each: each.activations + each.logits)
    weights = rows.parameters + drafting[0].parameters
    return rows._replace(parameters=weights, activations=most.activations, logits=most.logits)


def _with_state(once: Memory, work: Workload, stack: Stack) -> Memory:
    """Return the memory of a training step with the state that the stack keeps."""
    if stack.state_bytes is None:
        return once
    numbers = sum(local_shapes.stored(work, d.axes, d.shape) for d in work.trainable.values())
    more = round(stack.state_bytes * numbers) - _state_bytes(work, numbers)
    return once._replace(optimizer=once.optimizer + more)


def _of_inference(once: Memory, work: Workload, stack: Stack) -> Memory:
    """Return the memory of a step of inference whose matrices, but for tables, and whose cache are as narrow as the
    stack has them. Scales of narrow numbers are not counted."""
    matrices = sum(local_shapes.stored(work, d.axes, d.shape) for d in work.parameters.values() if d.projection)
    saved = round(matrices * (work.itemsize - stack.weight_bytes(work.itemsize)))
    cache = round(once.kv_cache * stack.cache_share(work.itemsize))
    return once._replace(parameters=once.parameters - saved, kv_cache=cache)


def _state_bytes(work: Workload, numbers: int) -> int:
    """Return the bytes of parameters, their working copy, gradients and optimizer state of jaxlm's own step."""
    working = work.itemsize if work.dtype != "float32" else 0
    return numbers * (4 + working + work.itemsize) + trained(work).optimizer
