"""Measure what an engine takes of the host: in each step, and until it is ready to serve.

    python benchmarks/engine_host.py MODEL [--rows 1,8] [--context 500] [--steps 100] [--starts 4] [--beside FOLDER]

MODEL is a run or a directory of published weights. `host_share` is the part of a step in which the processor neither
computes the model nor waits for it: planning, writing the batch, dispatching the programs, and handing out tokens.
`start_s` is the time from a new process to an engine whose programs are all ready, as a server has before its first
request, and `first_text_s` that to the first token of `jaxlm generate`; the first start fills the cache of compiled
programs, and the medians are of the others.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results

from jaxlm.core import accelerators

READY = """
import sys
from jaxlm import api
from jaxlm.core import collector, compilation_cache
getattr(collector, "begin_rarely", lambda: None)()  # as commands do
compilation_cache.enable(print)
api.load(sys.argv[1]).engine().warm()
"""


def host_work(model: str, rows: int, context: int, steps: int) -> dict[str, float]:
    """Return seconds of a step, and of what the host does in it."""
    import jax

    from jaxlm import api
    from jaxlm.inference.measured import decode_steps
    from jaxlm.inference.settings import EngineSettings

    engine = api.load(model, engine=EngineSettings(slots=rows)).engine()
    engine.runner.warm_multi_step()
    together = engine.runner.steps_of(rows)
    run, dispatches = decode_steps(engine, rows, context, 2 * steps), max(1, steps // together)
    steps = dispatches * together
    spent = {"dispatch": 0.0, "wait": 0.0}

    def timed(name: str, function: Any) -> Any:
        def call(*operands: Any) -> Any:
            began = time.perf_counter()
            found = function(*operands)
            spent[name] += time.perf_counter() - began
            return found

        return call

    engine.runner._read_rows = timed("dispatch", engine.runner._read_rows)
    engine.runner.draw = timed("dispatch", engine.runner.draw)
    engine.runner.run = timed("dispatch", engine.runner.run)
    run(dispatches)
    spent |= {"dispatch": 0.0, "wait": 0.0}
    waits, jax.device_get = jax.device_get, timed("wait", jax.device_get)
    try:
        began = time.perf_counter()
        run(dispatches)
        total = time.perf_counter() - began
    finally:
        jax.device_get = waits
    return {
        "rows": rows,
        "steps_per_dispatch": together,
        "step_s": total / steps,
        "dispatch_s": spent["dispatch"] / steps,
        "plan_and_tokens_s": (total - spent["dispatch"] - spent["wait"]) / steps,
        "host_share": 1 - spent["wait"] / total,
    }


def starts(command: list[str], times: int, checkouts: list[Path]) -> list[dict[str, Any]]:
    """Return the seconds that a command takes with the source of each checkout, which alternate, each with a cache of
    compiled programs of its own."""
    measured: list[dict[str, list[float]]] = [{"s": [], "cpu_s": []} for _ in checkouts]
    with tempfile.TemporaryDirectory() as caches:
        for _ in range(times):
            for index, (checkout, row) in enumerate(zip(checkouts, measured, strict=True)):
                environment = os.environ | {"XDG_CACHE_HOME": f"{caches}/{index}", "PYTHONPATH": str(checkout)}
                began, before = time.perf_counter(), os.times()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=caches)
                after = os.times()
                row["s"].append(time.perf_counter() - began)
                children = "children_user", "children_system"
                row["cpu_s"].append(sum(getattr(after, each) - getattr(before, each) for each in children))
    return [
        {
            "cold": row["s"][0],
            "warm": row["s"][1:],
            "median": statistics.median(row["s"][1:]),
            "cpu_median": statistics.median(row["cpu_s"][1:]),
        }
        for row in measured
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8", help="sequences: numbers, or '' for none (%(default)s)")
    parser.add_argument("--context", type=int, default=500, help="tokens of the prompts (%(default)s)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--starts", type=int, default=4, help="times that a process is started (%(default)s)")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="a checkout of another version to compare with")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    arguments = parser.parse_args()
    accelerators.choose()
    steps = []
    for rows in map(int, filter(None, arguments.rows.split(","))):
        steps.append(found := host_work(arguments.model, rows, arguments.context, arguments.steps))
        print(f"{rows} sequences: {1e3 * found['step_s']:.2f} ms a step, of which the host {found['host_share']:.1%}")
    model = str(Path(arguments.model).absolute()) if Path(arguments.model).exists() else arguments.model
    generate = [sys.executable, "-m", "jaxlm", "generate", model, "--prompt", "a", "--max-tokens", "1"]
    checkouts = [Path(__file__).parents[1], *([arguments.beside.absolute()] if arguments.beside else [])]
    begun = {}
    for name, command in (("start_s", [sys.executable, "-c", READY, model]), ("first_text_s", generate)):
        own, *others = starts(command, arguments.starts, checkouts)
        begun[name] = own
        print(f"{name}: {own['cold']:.1f} s, then {own['median']:.2f} s ({own['cpu_median']:.2f} s of the processor)")
        for other in others:
            ratios = {"": own["median"] / other["median"], "cpu_": own["cpu_median"] / other["cpu_median"]}
            begun[name] |= {"beside": other, **{f"{of}ratio": ratio for of, ratio in ratios.items()}}
            print(f"  beside {other['median']:.2f} s: {ratios['']:.2f} x, of the processor {ratios['cpu_']:.2f} x")
    described = {"context": arguments.context, "steps": steps, **begun}
    print(results.write(f"engine_host-{Path(arguments.model).name}", results.cpu(), described, arguments.out))


if __name__ == "__main__":
    main()
