"""Compare decoding on a CPU with transformers' and llama.cpp's: the time of one token of every sequence.

    pip install torch==2.13.0 'transformers>=5'
    pip install --no-binary llama-cpp-python llama-cpp-python gguf   # builds llama.cpp; what is missing is left out
    python benchmarks/decode.py MODEL [--rows 1,8] [--context 500] [--dtype float32]

MODEL is a directory of published weights, or "gpt2-124m" or "llama-125m": such a model with random weights. Each
program runs in a separate process on random prompts of that many tokens; blocks of steps alternate, so that all run
under the same conditions, and the first block of each is warm-up. The engine runs exact, as it is served, and with
--fast. llama.cpp reads the same weights from a GGUF file in the same dtype, and keeps keys and values in float16, as it
does by default. Beside them stands the time in which a step's weights, and the keys and values of so many tokens, can
be read at all: at the bandwidth of a sum over an array of 256 MiB, measured here.
"""

import argparse
import importlib.util
import os
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
        programs = engine.runner.programs
        weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(programs.abstract_parameters()))
        tokens = [each / programs.page for each in programs.page_bytes]
        return {
            "device": jax.devices()[0].device_kind,
            "weight_bytes": weights,
            "bytes_per_token": tokens[0] if len(tokens) == 1 else None,
        }

    return interleave.Worker(run, facts)


def transformers_steps(model: Path, rows: int, context: int, dtype: str, **options: Any) -> interleave.Worker:
    """Return a worker with the forward pass of transformers for one token of each of `rows` sequences. `options`: of
    loading the model."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **options).eval()
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


def llama_cpp_steps(model: Path, rows: int, context: int, dtype: str) -> interleave.Worker:
    """Return a worker with llama.cpp's pass for one token of each of `rows` sequences."""
    import ctypes

    import gguf_file
    import llama_cpp as cpp
    import numpy as np

    cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        gguf_file.write(model, file, dtype)
        loaded = cpp.llama_model_load_from_file(str(file).encode(), cpp.llama_model_default_params())
    if not loaded:
        raise RuntimeError("llama.cpp does not load the model")
    how = cpp.llama_context_default_params()
    how.n_ctx = rows * cpp.llama_model_n_ctx_train(loaded)
    how.n_seq_max, how.n_batch = rows, max(rows, context)
    how.n_threads = how.n_threads_batch = os.cpu_count()
    state = cpp.llama_init_from_model(loaded, how)
    vocabulary = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(loaded))
    batch = cpp.llama_batch_init(how.n_batch, 0, 1)

    def read(tokens: list[int], positions: list[int], sequences: list[int]) -> None:
        """Read tokens, those of a sequence after one another; the last of each sequence has logits."""
        batch.n_tokens = len(tokens)
        following = [*sequences[1:], None]
        for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
            batch.logits[i] = following[i] != sequence
        if cpp.llama_decode(state, batch):
            raise RuntimeError("llama.cpp does not decode")

    def drawn(row: int) -> int:
        logits = ctypes.cast(cpp.llama_get_logits_ith(state, row), ctypes.POINTER(ctypes.c_float * vocabulary))
        return int(np.frombuffer(logits.contents, np.float32).argmax())

    prompts = np.random.default_rng(0).integers(0, vocabulary, (rows, context)).tolist()
    tokens = []
    for sequence, prompt in enumerate(prompts):
        read(prompt, list(range(context)), [sequence] * context)
        tokens.append(drawn(context - 1))
    length = context

    def run(n: int) -> None:
        nonlocal tokens, length
        for _ in range(n):
            read(tokens, [length] * rows, list(range(rows)))
            tokens, length = [drawn(row) for row in range(rows)], length + 1

    return interleave.Worker(run, lambda: {"threads": how.n_threads, "keys_and_values": "float16"})


def random_model(name: str, folder: Path) -> Path:
    """Write a model with random weights, and return its directory."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = MODELS[name]
    made = getattr(transformers, config["architecture"])(transformers.AutoConfig.for_model(**config["config"]))
    made.save_pretrained(folder / name)
    return folder / name


MODELS = {
    "gpt2-124m": {"architecture": "GPT2LMHeadModel", "config": {"model_type": "gpt2"}},
    "llama-125m": {
        "architecture": "LlamaForCausalLM",
        "config": {
            "model_type": "llama",
            "vocab_size": 32_000,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "max_position_embeddings": 1024,
        },
    },
}
WORKERS = {
    "jaxlm": partial(engine_steps, exact=True),
    "jaxlm-fast": partial(engine_steps, exact=False),
    "transformers": transformers_steps,
    "llama.cpp": llama_cpp_steps,
}
NEEDS = {"transformers": "transformers", "llama.cpp": "llama_cpp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8", help="sequences, one or several numbers (%(default)s)")
    parser.add_argument("--context", default="500", help="tokens of the prompts (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="in each block")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    accelerators.choose()
    numbers = [[int(each) for each in given.split(",")] for given in (arguments.rows, arguments.context)]
    sizes = [(rows, context) for context in numbers[1] for rows in numbers[0]]
    if arguments.worker:
        ((rows, context),) = sizes
        make = partial(WORKERS[arguments.worker], Path(arguments.model), rows, context, arguments.dtype)
        return interleave.serve(make)
    names = [name for name in WORKERS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    with tempfile.TemporaryDirectory() as folder:
        known = arguments.model in MODELS
        model = random_model(arguments.model, Path(folder)) if known else Path(arguments.model)
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
    print(results.write(name, results.cpu(), {**described, "cases": cases}, arguments.out))


if __name__ == "__main__":
    main()
