"""Compare the training step and MFU on one NVIDIA GPU with compiled PyTorch.

    pip install -e '.[cuda]' torch
    python benchmarks/train_gpu.py [--models gpt2-355m,llama3.2_1b] [key=value …]

Times the training step of each model (a file in configs/models or this folder, or a path) as `jaxlm train` compiles it,
and the same model, loss, clipping and AdamW in plain PyTorch: `torch.compile`, its own fused attention, autocast to
bfloat16 and fused AdamW. Each runs in a separate process with its own allocator, and blocks of steps alternate, so that
both run at the same clocks; the first block of each is warm-up. Both stay on the GPU between blocks: JAX allocates
memory on demand (XLA_PYTHON_CLIENT_PREALLOCATE=false), and the two must fit together. Every step has new random tokens.

Writes train_gpu-<model>.json for each, with what is changed but batch and sequence in its name, such as
train_gpu-gpt2-355m-scan_layers-false.json. MFU is the model's FLOPs over the step's time and the chip's published
peak. The FLOPs are the matrix products of jaxlm's step without rematerialisation, counted from its jaxpr with
attention whole, and the same number is used for both. Beside the measured step stand the bracket of seconds and the
bytes that are counted for this chip (`jaxlm plan`). With JAX_PLATFORMS=cpu it runs on a CPU, as its test does.
"""

import argparse
import importlib.util
import math
import os
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import interleave
import results
from training_steps import jaxlm_steps, pytorch_steps

from jaxlm import api
from jaxlm import config as configuration
from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware import catalog

MODELS = "gpt2-355m,llama3.2_1b"
FOLDERS = Path(__file__).parents[1] / "configs" / "models", Path(__file__).parent


def on_cpu() -> bool:
    return os.environ["JAX_PLATFORMS"] == "cpu"


def jaxlm_worker(experiment: Experiment) -> interleave.Worker:
    import jax

    if jax.default_backend() != ("cpu" if on_cpu() else "gpu"):  # JAX would fall back to the CPU
        raise RuntimeError("JAX finds no NVIDIA GPU")
    return jaxlm_steps(experiment)


def pytorch_worker(experiment: Experiment) -> interleave.Worker:
    return pytorch_steps(experiment, "cpu" if on_cpu() else "cuda", compiled=True)


WORKERS = {"jaxlm": jaxlm_worker, "pytorch-compiled": pytorch_worker}


def flops(experiment: Experiment) -> dict[str, int]:
    """Return FLOPs of one step: `napkin` (6 × matmul parameters × tokens), and `model` (counted, attention whole)."""
    import jax

    from jaxlm.costs.jaxpr.count import count
    from jaxlm.models import tree
    from jaxlm.training.step import TrainStep

    model, training = experiment.model, experiment.training
    execution = experiment.execution.model_copy(update={"remat": "none"})
    steps = TrainStep(model, execution, training, experiment.optimizer)
    row = jax.ShapeDtypeStruct((training.batch, training.sequence), "int32")
    batch = {name: row for name in ("tokens", "targets", "segments", "positions")}

    matrices = {path: d.shape for path, d in tree.paths(tree.dimensions(tree.abstract(model)[1])).items() if d.inputs}
    lookups = {"positions"} if model.tied_embeddings else {"positions", "embedding"}
    multiplied = sum(math.prod(shape) for path, shape in matrices.items() if path not in lookups)
    return {
        "napkin": 6 * multiplied * training.batch * training.sequence,
        "model": count(steps.train, jax.eval_shape(steps.init), batch).matmul_flops,
    }


def compare(path: Path, experiment: Experiment, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time one model and return its entry of the results file."""
    from jaxlm.models.tree import parameter_count

    model, training = experiment.model, experiment.training
    command = [sys.executable, __file__, "--models", str(path), *arguments.overrides, "--worker"]
    commands = {"jaxlm": [*command, "jaxlm"]}
    absent = "--without-torch" if arguments.without_torch else "torch is not installed"
    if not arguments.without_torch and importlib.util.find_spec("torch"):
        commands["pytorch-compiled"], absent = [*command, "pytorch-compiled"], None
    worked = interleave.run_interleaved(commands, arguments.steps, arguments.blocks)
    device = next((done.facts["device"] for done in worked.values() if not done.failed), None)
    counted, peak = flops(experiment), peak_flops(device, experiment.execution.dtype)

    def row(done: interleave.WorkerResult) -> dict[str, Any]:
        if done.failed:
            return {"failed": done.failed}
        tokens, jaxlm = training.batch * training.sequence, worked["jaxlm"]
        figures = interleave.row(done.step_s, tokens, None if jaxlm.failed else jaxlm.step_s)
        first, _, third = statistics.quantiles(done.step_s, method="inclusive")
        mfu = counted["model"] / figures["median_step_s"] / peak if peak else None
        return {"mfu": mfu, "quartiles_step_s": [first, third], **done.facts, **figures}

    return {
        "device": device,
        "config": path.name,
        "parameters": parameter_count(model),
        **training.model_dump(include={"batch", "sequence"}, mode="json"),
        **experiment.execution.model_dump(include={"dtype", "remat", "scan_layers"}, mode="json"),
        "steps_per_block": arguments.steps,
        "flops": counted,
        "peak_flops": peak,
        "counted": counted_step(experiment, device),
        **{name: row(done) for name, done in worked.items()},
        **({"pytorch-compiled": {"left_out": absent}} if absent else {}),
    }


def counted_step(experiment: Experiment, device: str | None) -> dict[str, float] | None:
    """Return the counted seconds and bytes of a step on one such device; None for a chip that no catalog has."""
    known = device and catalog.of_kind(device)
    if not known:
        return None
    (plan,), _ = api.plan(experiment, f"{known.id}:1")
    return {
        "scan_layers": plan.layers.in_loop,
        "lower_bound_s": plan.time.lower_bound,
        "expected_s": plan.time.expected,
        "upper_bound_s": plan.time.upper_bound,
        "memory_bytes": plan.memory.total,
    }


def peak_flops(device: str | None, dtype: str) -> float | None:
    """Return the published peak FLOP/s of a device; None if there is none, as for a CPU."""
    try:
        return catalog.find(results.chip(device)).peak(dtype) if device else None
    except InputError:
        return None


def find(model: str) -> Path:
    """Return the TOML file of a model."""
    named = [folder / f"{model}.toml" for folder in FOLDERS]
    for path in (Path(model), *named):
        if path.is_file():
            return path
    raise InputError(f"unknown model {model}: not a file, and not in configs/models or benchmarks")


def show(name: str, described: dict[str, Any]) -> None:
    print(f"{name}, {described['batch']} × {described['sequence']} tokens on {described['device'] or 'no device'}")
    if counted := described["counted"]:
        low, high = (1e3 * counted[f"{bound}_bound_s"] for bound in ("lower", "upper"))
        print(f"  counted: {low:.1f} to {high:.1f} ms, {counted['memory_bytes'] / 1e9:.1f} GB")
    for worker in WORKERS:
        row = described[worker]
        if "median_step_s" not in row:
            print(f"  {worker}: {row}")
            continue
        print("  " + interleave.describe(worker, row))
        mfu, memory = row["mfu"], row["peak_memory_bytes"]
        low, high = (1e3 * seconds for seconds in row["quartiles_step_s"])
        print(
            f"    half of the blocks within {low:.1f} to {high:.1f} ms; "
            f"MFU {f'{mfu:.1%}' if mfu else 'unknown'}; peak {f'{memory / 1e9:.1f} GB' if memory else 'unknown'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="for every model")
    parser.add_argument("--models", default=MODELS, help=f"separated by commas ({MODELS})")
    parser.add_argument("--batch", help="training.batch, by default as the model's file says")
    parser.add_argument("--sequence", help="training.sequence, likewise")
    parser.add_argument("--remat", help="execution.remat of jaxlm, such as none or full")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="in each block")
    parser.add_argument("--without-torch", action="store_true", help="time jaxlm alone")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for key in ("training.batch", "training.sequence", "execution.remat"):
        if (value := getattr(arguments, key.partition(".")[2])) is not None:
            arguments.overrides.append(f"{key}={value}")

    # One GPU, for the workers: this process itself starts no backend.
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        paths = {path.stem: path for path in map(find, arguments.models.split(","))}
        experiments = {name: configuration.load(path, arguments.overrides) for name, path in paths.items()}
    except InputError as error:
        parser.error(str(error))
    if arguments.worker:
        (experiment,) = experiments.values()
        return interleave.serve(lambda: WORKERS[arguments.worker](experiment))

    sizes = "training.batch=", "training.sequence="
    changed = [
        re.sub(r"^(training|execution)\.", "", each) for each in arguments.overrides if not each.startswith(sizes)
    ]
    changes = [re.sub(r"[^\w.]+", "-", each).strip("-") for each in changed]
    failed = []
    for name, experiment in experiments.items():
        described = compare(paths[name], experiment, arguments)
        show(name, described)
        if device := described["device"]:
            print(
                results.write("-".join(["train_gpu", name, *changes]), results.chip(device), described, arguments.out)
            )
        else:
            failed.append(name)
    if failed:
        raise SystemExit(f"nothing ran of {', '.join(failed)}: no results are written")


if __name__ == "__main__":
    main()
