"""Measure the training loop's host time per step. The target is under 2 % of the step on a chip.

    python benchmarks/loop_cost.py [CONFIG] [key=value …]

Times the host's work during a step of CONFIG (by default configs/quickstart.toml): dispatching the step, fetching a
ready batch, putting it on the devices, reading the previous step's metrics, and recording a line; and the step itself.
On a CPU the two share the cores. On a chip the host's time is hidden unless it exceeds the step; no chip has been
measured yet.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import results

from jaxlm import config as configuration
from jaxlm.config import mesh_layout

DEFAULT = Path(__file__).parents[1] / "configs" / "quickstart.toml"


def median(work: Callable[[], object], settle: Callable[[], object] = lambda: None, times: int = 300) -> float:
    """Return the median seconds of `work`, run after `settle` each time, without the first tenth of the runs."""
    seconds = []
    for _ in range(times):
        settle()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[times // 10 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    arguments = parser.parse_args()
    experiment = configuration.load(arguments.config, arguments.overrides)

    import jax

    from jaxlm.costs.layer_loops import experiment_on
    from jaxlm.data.dataset import prepare
    from jaxlm.data.loader import training_batches
    from jaxlm.data.packing import Rows
    from jaxlm.parallel.batches import process_rows, put_batch
    from jaxlm.parallel.devices import mesh_here
    from jaxlm.training.environment import memory_use
    from jaxlm.training.loop import to_host
    from jaxlm.training.paths import RunPaths
    from jaxlm.training.recorder import Recorder
    from jaxlm.training.step import TrainStep

    training = experiment.training
    mesh = mesh_here(experiment.mesh.least().size, partial(mesh_layout.layout, experiment))
    dataset = prepare(experiment.data, experiment.model.vocab_size)
    rows = [(Rows(source.train, training.sequence), source.weight) for source in dataset.sources.values()]
    share = process_rows(training.batch, mesh)
    batches = training_batches(rows, training.batch, training.seed, 0, share)
    host = next(batches)

    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
        execution = experiment_on(experiment, mesh).execution
        steps = TrainStep(experiment.model, execution, training, experiment.optimizer).jitted(mesh)
        state, batch = steps.init(), put_batch(host, mesh)
        program = steps.train.lower(state, batch).compile()
        metrics = None

        def step() -> None:
            nonlocal state, metrics
            state, metrics = program(state, batch)

        def settle() -> None:
            jax.block_until_ready((state, metrics))

        def whole() -> None:
            step()
            settle()

        whole_s = median(whole, times=60)
        parts = {
            "dispatch_s": median(step, settle, times=60),
            "fetch_s": median(lambda: next(batches), lambda: time.sleep(0.01)),
            "put_batch_s": median(lambda: put_batch(host, mesh)),
            "read_metrics_s": median(lambda: to_host(metrics), lambda: (step(), settle()), times=60),
        }
        row = {"step": 0, **{name: 1.0 for name in ("loss", "step_s", "tokens_per_s", "host_s", "grad_norm")}}
        with Recorder(RunPaths(Path(folder)), experiment.records, 0, {}) as recorder:

            def record() -> None:
                row["step"] += 1
                recorder.write("train", {**row, **memory_use(mesh.local_devices)})

            line_s = median(record)
        parts["record_s"] = line_s / training.log_every
    host_s, chip = sum(parts.values()), results.chip(mesh.devices.flat[0].device_kind)
    for name, seconds in parts.items():
        print(f"{name}: {1e6 * seconds:.0f} µs")
    print(f"host {1e3 * host_s:.2f} ms of a step of {1e3 * whole_s:.1f} ms: {host_s / whole_s:.1%}")
    described = {
        "config": arguments.config.name,
        "overrides": arguments.overrides,
        "step_s": whole_s,
        "host_s": host_s,
        "host_share": host_s / whole_s,
        "record_line_s": line_s,
        **parts,
    }
    print(results.write(f"loop_cost-{arguments.config.stem}", chip, described))


if __name__ == "__main__":
    main()
