"""The measurements of `gpu.py`, each a function that runs in a process of its own and yields figures.

A figure is a name, with its unit, and a number; `details` go into the results file. What JAX and PyTorch need is
imported where a measurement begins, so that the names of all are known without them.
"""

import gzip
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Figure(NamedTuple):
    """A measured number.

    Attributes:
      name: with its unit, such as "loop, ms a step".
      kernel: the row as `kernels_pallas.bench` records it, where it is of a kernel.
    """

    name: str
    value: float
    details: dict[str, Any] = {}  # noqa: RUF012, never changed
    kernel: dict[str, Any] | None = None


def assembler(small: bool, out: Path) -> Iterator[Figure]:
    """Compile the forward kernel for Hopper, and count what its assembler remarks on: C75xx, products in series."""
    program = (
        "import jax, jax.numpy as jnp\n"
        "from kernels_pallas.flash_attention import causal, flash_attention\n"
        "x = jnp.ones((1, 1024, 2, 128), jnp.bfloat16)\n"
        f"implementation = {None if small else 'mosaic_gpu'!r}\n"
        "run = jax.jit(lambda x: flash_attention(x, x, x, key_range=causal(1024), implementation=implementation))\n"
        "jax.block_until_ready(run(x))\n"
    )
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    remarks = re.findall(r"C75\d\d", done.stderr + done.stdout)
    yield Figure("remarks C75xx", len(remarks), {"remarks": sorted(set(remarks)), "tools": _tools()})


def _tools() -> dict[str, str]:
    """Return what the CUDA tools on the path, and JAX's libraries, say of their versions."""
    said = {}
    for tool in ("ptxas", "nvcc", "nvidia-smi"):
        try:
            done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = [line for line in done.stdout.splitlines() if re.search(r"\d+\.\d+", line)]
        said[tool] = lines[-1].strip() if lines else ""
    return said


def kernels(
    small: bool,
    out: Path,
    operations: Sequence[str],
    patterns: Sequence[str] = (),
    implementations: Sequence[str] = (),
) -> Iterator[Figure]:
    """Time kernels beside XLA, forward and in training. Attention's figures are TFLOP/s, the loss's milliseconds, and
    those of other operations the share of a copy's bandwidth."""
    from kernels_pallas.bench import run
    from kernels_pallas.bench.ceilings import ceilings

    limits, implementations = ceilings(), () if small else implementations
    yield Figure("copy, GB/s", limits.copy_bytes_per_s / 1e9, {"ceilings": limits._asdict()})
    for comparison in run.comparisons(operations, () if small else patterns):
        for row in run.compare(comparison, limits, rounds=2 if small else 5, implementations=implementations):
            name = "{operation}, {case}, {direction}, {implementation}".format(**row)
            if "reason" in row:
                yield Figure(name, float("nan"), {"reason": row["reason"]}, row)
            elif row["operation"] == "flash_attention":
                yield Figure(f"{name}, TFLOP/s", row["flops_per_s"] / 1e12, kernel=row)
            elif row["operation"] == "linear_cross_entropy":
                yield Figure(f"{name}, ms", 1e3 * row["seconds"], kernel=row)
            else:
                yield Figure(f"{name}, share of copy", row["of_copy"], kernel=row)


def exact(small: bool, out: Path) -> Iterator[Figure]:
    """Compare attention's kernels on masks of all kinds with the reference: the largest error, over the largest
    number, of the output and of the gradients."""
    import jax
    import jax.numpy as jnp

    from kernels_pallas.bench.run import _is_for
    from kernels_pallas.core import target
    from kernels_pallas.core.registry import OPERATIONS

    operation = OPERATIONS["flash_attention"]
    chip = target.of_device(jax.devices()[0])
    of_chip = [name for name in operation.implementations if _is_for(name, chip)] or ["xla"]
    cases = [case for case in operation.used_in("test") if "bfloat16" in case.dtypes]
    for implementation in of_chip:
        worst, compared = 0.0, 0
        for case in cases[:2] if small else cases:
            arrays = case.draw("bfloat16")
            inputs = {name: arrays.pop(name) for name in case.differentiable()}

            def both(implementation: str, inputs: dict = inputs, others: dict = arrays, case: Any = case) -> Any:
                def forward(inputs: dict) -> Any:
                    return operation.function(**inputs, **others, **case.options, implementation=implementation)

                results, pull_back = jax.vjp(forward, inputs)
                return results, pull_back(jax.tree.map(jnp.ones_like, results))

            try:
                computed = jax.device_get(jax.jit(both, static_argnums=0)(implementation))
            except NotImplementedError:
                continue
            expected = jax.device_get(jax.jit(both, static_argnums=0)("reference"))
            compared += 1
            for x, y in zip(jax.tree.leaves(computed), jax.tree.leaves(expected), strict=True):
                worst = max(worst, _error(x, y))
        yield Figure(f"{implementation}, largest error", worst, {"cases": compared})


def _error(x: Any, y: Any) -> float:
    import numpy as np

    x, y = (np.nan_to_num(np.asarray(each, np.float64), neginf=0.0) for each in (x, y))
    return float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-6)) if x.size else 0.0


def train(
    small: bool,
    out: Path,
    model: str,
    overrides: Sequence[str] = (),
    pytorch: bool = False,
    one_document: bool = False,
    keeps: str = "",
) -> Iterator[Figure]:
    """Time the training step, and give its MFU. `keeps`: the name of files with the optimised HLO and a trace."""
    from train_gpu import find, flops, peak_flops
    from training_steps import jaxlm_steps, pytorch_steps

    from jaxlm import config

    tiny = ("model.num_layers=1", "model.d_model=64", "training.batch=2", "training.sequence=32") if small else ()
    sizes = ("model.vocab_size=512", "model.context_length=64", "model.feed_forward.d_ff=128") if small else ()
    experiment = config.load(find(model), [*overrides, *tiny, *sizes])
    began = time.perf_counter()
    if pytorch:
        worker = pytorch_steps(experiment, "cpu" if small else "cuda", compiled=not small)
    else:
        worker = jaxlm_steps(experiment, one_document)
    worker.run(2)
    yield Figure("first two steps, s", time.perf_counter() - began)
    times = []
    for _ in range(2 if small else 6):
        start = time.perf_counter()
        worker.run(1 if small else 5)
        times.append((time.perf_counter() - start) / (1 if small else 5))
    facts = worker.facts()
    step_s, counted = statistics.median(times), flops(experiment)["model"]
    yield Figure("ms a step", 1e3 * step_s, {"blocks_step_s": times, **facts})
    if peak := peak_flops(facts["device"], experiment.execution.dtype):
        yield Figure("MFU, %", 100 * counted / step_s / peak)
    if keeps:
        _keep(worker, out / keeps)


def _keep(worker: Any, folder: Path) -> None:
    """Write the program that ran, and a trace of two of its steps."""
    import jax

    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / "optimised_hlo.txt.gz", "wt", encoding="utf-8") as file:
        file.write(worker.program())
    with jax.profiler.trace(folder / "trace"):
        worker.run(2)


def decode(small: bool, out: Path, model: str, contexts: Sequence[int]) -> Iterator[Figure]:
    """Time a token of one sequence, by random weights in bfloat16, at each length."""
    import jax
    import jax.numpy as jnp

    from jaxlm import config
    from jaxlm.inference.engine import Engine
    from jaxlm.inference.measured import decode_steps, read_bytes_per_s
    from jaxlm.inference.settings import EngineSettings
    from jaxlm.parallel.layout import Layout
    from jaxlm.parallel.mesh import make_mesh

    overrides = ["model.num_layers=1", "model.d_model=64", "model.vocab_size=512"] if small else []
    overrides += ["model.feed_forward.d_ff=128"] if small else []
    described = config.load(ROOT / "configs" / "models" / f"{model}.toml", overrides).model
    mesh = make_mesh(Layout(), jax.devices()[:1])
    dtype = jnp.dtype("float32" if small else "bfloat16")
    weights = _random_weights(described, dtype, mesh)
    read_s = sum(x.nbytes for x in jax.tree.leaves(weights)) / read_bytes_per_s()
    for context in (8, 32) if small else contexts:
        steps, blocks = (2, 1) if small else (10, 5)
        settings = EngineSettings(slots=1, context=context + (blocks + 1) * steps + 2)
        run = decode_steps(Engine(described, weights, mesh, settings), 1, context, (blocks + 1) * steps)
        times = []
        for _ in range(blocks + 1):
            start = time.perf_counter()
            run(steps)
            times.append((time.perf_counter() - start) / steps)
        median = statistics.median(times[1:])
        details = {"blocks_step_s": times[1:], "weights_read_s": read_s}
        yield Figure(f"{context} tokens, ms a token", 1e3 * median, details)
        yield Figure(f"{context} tokens, % of the time to read the weights", 100 * read_s / median)


def _random_weights(model: Any, dtype: Any, mesh: Any) -> Any:
    """Return normal numbers in place of weights, made on the device one array at a time."""
    import jax
    import jax.numpy as jnp

    from jaxlm.models import tree

    shapes = tree.shapes(tree.abstract(model)[1])
    leaves, structure = jax.tree.flatten(shapes)
    draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.float32).astype(dtype), static_argnums=1)
    with jax.set_mesh(mesh):
        return structure.unflatten([draw(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)])


MEASUREMENTS: dict[str, Callable[..., Iterator[Figure]]] = {
    each.__name__: each for each in (assembler, kernels, exact, train, decode)
}
