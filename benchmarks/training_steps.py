"""Workers with jaxlm's and PyTorch's training step on random tokens: the same model, loss, clipping and AdamW."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from interleave import Worker

if TYPE_CHECKING:
    from jaxlm.config.experiment import Experiment


class TrainingWorker(NamedTuple):
    """A `Worker` of training steps. `program`: returns the text of the optimised program that runs."""

    run: Callable[[int], None]
    facts: Callable[[], dict[str, Any]]
    program: Callable[[], str]


def jaxlm_steps(experiment: "Experiment", one_document: bool = False) -> TrainingWorker:
    """Return a worker with the steps of `jaxlm train`, on its mesh, with rows that are known to be one document each or
    not."""
    import jax
    import numpy as np

    from jaxlm.config import mesh_layout
    from jaxlm.costs.layer_loops import experiment_on
    from jaxlm.parallel.batches import put_batch
    from jaxlm.parallel.devices import mesh_here
    from jaxlm.training.step import TrainStep

    training, draw = experiment.training, np.random.default_rng(0)
    shape = training.batch, training.sequence
    mesh = mesh_here(experiment.mesh.least().size, partial(mesh_layout.layout, experiment))
    with jax.set_mesh(mesh):
        execution = experiment_on(experiment, mesh).execution
        steps = TrainStep(experiment.model, execution, training, experiment.optimizer, one_document=one_document)
        compiled = steps.jitted(mesh)
        state = compiled.init()
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))

    def batch():
        tokens, targets = draw.integers(0, experiment.model.vocab_size, (2, *shape), dtype=np.int32)
        host = {"tokens": tokens, "targets": targets, "segments": np.ones(shape, np.int32), "positions": positions}
        return put_batch(host, mesh)

    def run(n: int) -> None:
        nonlocal state
        with jax.set_mesh(mesh):
            for _ in range(n):
                state, metrics = compiled.train(state, batch())
            jax.block_until_ready(metrics)

    def ran() -> jax.stages.Compiled:
        with jax.set_mesh(mesh):  # not compiled again
            return compiled.train.lower(state, batch()).compile()

    def facts() -> dict[str, Any]:
        """Return the device, and its peak bytes by the allocator and by XLA's plan of the step."""
        device, planned = mesh.devices.flat[0], ran().memory_analysis()
        outputs = planned.output_size_in_bytes - planned.alias_size_in_bytes
        return {
            "device": device.device_kind,
            "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
            "compiled_peak_memory_bytes": planned.argument_size_in_bytes + outputs + planned.temp_size_in_bytes,
        }

    return TrainingWorker(run, facts, lambda: ran().as_text())


def pytorch_steps(experiment: "Experiment", device: str = "cpu", compiled: bool = False) -> Worker:
    """Return a worker with the same steps in plain PyTorch.

    Parameters are in float32; products run under autocast if `execution.dtype` is narrower. On a GPU, AdamW is fused.

    Raises ValueError for settings that PyTorch's step does not have.
    """
    import torch
    from pytorch_model import TorchTransformer
    from torch import nn

    model, training, optimizer = experiment.model, experiment.training, experiment.optimizer
    if training.dropout or training.microbatches > 1 or optimizer.kind != "adamw":
        raise ValueError("the PyTorch step has no dropout, no microbatches and AdamW only")
    on_gpu = device == "cuda"
    torch.manual_seed(0)
    net = TorchTransformer(model).to(device)
    forward = torch.compile(net) if compiled else net
    adamw = torch.optim.AdamW(
        net.parameters(),
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
        fused=on_gpu or None,
    )
    dtype = getattr(torch, experiment.execution.dtype)
    autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)
    shape = 2, training.batch, training.sequence

    def run(n: int) -> None:
        for _ in range(n):
            # Copies from pinned memory do not wait for the previous step.
            both = torch.randint(0, model.vocab_size, shape, pin_memory=on_gpu).to(device, non_blocking=True)
            with autocast:
                loss = forward(*both)
            adamw.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), optimizer.clip_norm)
            adamw.step()
        if on_gpu:
            torch.cuda.synchronize()

    def facts() -> dict[str, Any]:
        return {
            "device": torch.cuda.get_device_name() if on_gpu else device,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        }

    return Worker(run, facts)
