"""Compare decoding on a CPU with Hugging Face transformers': the time of one token of every sequence.

    pip install torch==2.13.0 'transformers>=5'
    python benchmarks/decode.py MODEL [--rows 1,8] [--context 500] [--dtype float32]

MODEL is a directory of published weights, or "gpt2-124m": that architecture with random weights. Each program runs in a
separate process on random prompts of that many tokens; blocks of steps alternate, so that all run under the same
conditions, and the first block of each is warm-up. The engine runs exact, as it is served, and with --fast. Beside them
stands the time in which a step's weights, and the keys and values of so many tokens, can be read at all: at the
bandwidth of a sum over an array of 256 MiB, measured here.
"""

import argparse
import importlib.util
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import interleave
import results

from jaxlm.core import accelerators


def engine_steps(model: Path, rows: int, context: int, dtype: str, exact: bool) -> interleave.Worker:
    """Return a worker with the steps of the engine, in which `rows` sequences draw."""
    import jax

    from jaxlm import api
    from jaxlm.inference.measured import decode_steps
    from jaxlm.inference.settings import EngineSettings

    settings = EngineSettings(slots=rows, exact=exact)
    engine = api.load(model, dtype=dtype, engine=settings).engine()
    run = decode_steps(engine, rows, context, engine.longest - context - 1)

    def facts() -> dict[str, Any]:
        """Return the device, the bytes of the weights that a step reads, and those of a token's keys and values."""
        layout, counts = engine.runner.layout, engine.runner.counts
        pages = sum(array.nbytes for slots in engine.runner._pages.values() for array in slots.values())
        weights = sum(array.nbytes for array in jax.tree.leaves(engine.runner._parameters))
        return {
            "device": jax.devices()[0].device_kind,
            "weight_bytes": weights,
            "bytes_per_token": pages / (counts[0] * layout.size) if len(counts) == 1 else None,
        }

    return interleave.Worker(run, facts)


def transformers_steps(model: Path, rows: int, context: int, dtype: str) -> interleave.Worker:
    """Return a worker with the forward pass of transformers for one token of each of `rows` sequences."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, loaded.config.vocab_size, (rows, context), generator=generator)
    with torch.no_grad():
        state = loaded(prompts, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def run(n: int) -> None:
        nonlocal state
        for _ in range(n):
            token = state.logits[:, -1].argmax(-1, keepdim=True)
            state = loaded(token, past_key_values=state.past_key_values, use_cache=True)

    return interleave.Worker(run, lambda: {"threads": torch.get_num_threads()})


def random_gpt2(folder: Path) -> Path:
    """Write GPT-2 124M with random weights, and return its directory."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    return folder


WORKERS = {
    "jaxlm": partial(engine_steps, exact=True),
    "jaxlm-fast": partial(engine_steps, exact=False),
    "transformers": transformers_steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8", help="sequences, one or several numbers (%(default)s)")
    parser.add_argument("--context", default="500", help="tokens of the prompts (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="in each block")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    accelerators.choose()
    numbers = [[int(each) for each in given.split(",")] for given in (arguments.rows, arguments.context)]
    sizes = [(rows, context) for context in numbers[1] for rows in numbers[0]]
    if arguments.worker:
        ((rows, context),) = sizes
        make = partial(WORKERS[arguments.worker], Path(arguments.model), rows, context, arguments.dtype)
        return interleave.serve(make)
    names = list(WORKERS) if importlib.util.find_spec("transformers") else ["jaxlm", "jaxlm-fast"]
    with tempfile.TemporaryDirectory() as folder:
        model = random_gpt2(Path(folder)) if arguments.model == "gpt2-124m" else Path(arguments.model)
        from jaxlm.inference.measured import read_bytes_per_s

        bandwidth, cases = read_bytes_per_s(), []
        for rows, context in sizes:
            command = [sys.executable, __file__, str(model), "--rows", str(rows), "--context", str(context)]
            command += ["--dtype", arguments.dtype, "--worker"]
            commands = {name: [*command, name] for name in names}
            worked = interleave.run_interleaved(commands, arguments.steps, arguments.blocks)
            if failed := [f"{name}: {done.failed}" for name, done in worked.items() if done.failed]:
                raise SystemExit("\n".join(failed))
            facts = worked["jaxlm"].facts
            cached = rows * (context + arguments.steps * (arguments.blocks + 1) // 2) * (facts["bytes_per_token"] or 0)
            bound = (facts["weight_bytes"] + cached) / bandwidth
            found = {name: interleave.row(done.step_s, rows, worked["jaxlm"].step_s) for name, done in worked.items()}
            print(f"{rows} sequences, {context} tokens: read in {1e3 * bound:.1f} ms")
            for name, row in found.items():
                row["read_bound_over_this"] = bound / row["median_step_s"]
                print(f"  {interleave.describe(name, row)}; {row['read_bound_over_this']:.0%} of the read bound")
            cases.append({"rows": rows, "context": context, "read_bound_s": bound, "facts": facts, **found})
    name = f"decode-{Path(arguments.model).name}-{arguments.dtype}"
    described = {"dtype": arguments.dtype, "steps_per_block": arguments.steps, "read_bytes_per_s": bandwidth}
    print(results.write(name, results.cpu(), {**described, "cases": cases}))


if __name__ == "__main__":
    main()
