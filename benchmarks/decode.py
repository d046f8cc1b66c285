"""Compare decoding on a CPU with transformers' and llama.cpp's: the time of one token of every sequence.

    pip install torch==2.13.0 'transformers>=5'
    pip install --no-binary llama-cpp-python llama-cpp-python gguf   # builds llama.cpp; what is missing is left out
    python benchmarks/decode.py MODEL … [--rows 1,8] [--context 256] [--programs "jaxlm w8a8,llama.cpp Q8_0"]

MODEL is a directory of published weights, or "gpt2-124m" or "llama-125m": such a model with random weights. Each
program runs in a separate process on random prompts of that many tokens; blocks of steps alternate, so that all run
under the same conditions, and the first block of each is warm-up. The engine runs exact, as it is served, in float32,
bfloat16 and with quantised weights beside float32, and in float32 with --fast. llama.cpp reads the same weights from
files that it has narrowed itself, and keeps keys and values in float16, as it does by default.

A peer's `best_jaxlm_over_this` is the time of the fastest of ours of as many bits, relative to its own. Beside the
engine's steps stands the time in which their weights, and the keys and values of so many tokens, can be read at all: at
the bandwidth of a sum over an array of 256 MiB, measured here. Tables of which rows are looked up alone do not count.
"""

import argparse
import importlib.util
import operator
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import interleave
import results

from jaxlm.core import accelerators


def engine_steps(model: Path, rows: int, context: int, width: str, exact: bool = True) -> interleave.Worker:
    """Return a worker with the steps of the engine, in which `rows` sequences draw. `width`: a dtype, or a kind of
    quantised weights."""
    import jax

    from jaxlm import api
    from jaxlm.inference.measured import decode_steps
    from jaxlm.inference.settings import EngineSettings
    from jaxlm.models import tree

    form, dtype = ("none", width) if width in ("float32", "bfloat16") else (width, "float32")
    settings = EngineSettings(slots=rows, exact=exact)
    engine = api.load(model, [f"execution.quantize={form}"], dtype=dtype, engine=settings).engine()
    run = decode_steps(engine, rows, context, engine.longest - context - 1)

    def facts() -> dict[str, Any]:
        """Return the device, the bytes of the weights that a step reads, and those of a token's keys and values."""
        programs = engine.runner.programs
        weights = tree.paths(programs.abstract_parameters())
        looked_up = {"positions"} | (
            {"embedding"} if any(path.startswith("unembedding") for path in weights) else set()
        )
        read = sum(x.size * x.dtype.itemsize for path, x in weights.items() if path not in looked_up)
        tokens = [each / programs.page for each in programs.page_bytes]
        return {
            "device": jax.devices()[0].device_kind,
            "weight_bytes": read,
            "bytes_per_token": tokens[0] if len(tokens) == 1 else None,
        }

    return interleave.Worker(run, facts)


def transformers_steps(model: Path, rows: int, context: int, width: str, **options: Any) -> interleave.Worker:
    """Return a worker with the forward pass of transformers for one token of each of `rows` sequences. `options`: of
    loading the model."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, width), **options).eval()
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


def llama_cpp_steps(file: Path, rows: int, context: int) -> interleave.Worker:
    """Return a worker with llama.cpp's pass for one token of each of `rows` sequences, with the weights of a file."""
    import ctypes

    import llama_cpp as cpp
    import numpy as np

    cpp.llama_backend_init()
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

    size = cpp.llama_model_size(loaded)
    return interleave.Worker(
        run, lambda: {"threads": how.n_threads, "keys_and_values": "float16", "weight_bytes": size}
    )


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


class Program(NamedTuple):
    """A program that decodes. `bits`: of a weight. `needs`: the package that it is of."""

    bits: int
    steps: Callable[[Path, int, int], interleave.Worker]
    needs: str = "jaxlm"


def _programs() -> dict[str, Program]:
    programs = {"jaxlm-fast float32": Program(32, partial(engine_steps, width="float32", exact=False))}
    for width, bits in {"float32": 32, "bfloat16": 16, "int8": 8, "w8a8": 8, "int4": 4}.items():
        programs[f"jaxlm {width}"] = Program(bits, partial(engine_steps, width=width))
    for width, bits in {"float32": 32, "bfloat16": 16}.items():
        steps = partial(transformers_steps, width=width)
        programs[f"transformers {width}"] = Program(bits, steps, "transformers")
    for width, bits in {"F16": 16, "Q8_0": 8, "Q4_0": 4}.items():
        programs[f"llama.cpp {width}"] = Program(bits, llama_cpp_steps, "llama_cpp")
    return programs


PROGRAMS = _programs()


def weights_of(model: Path, names: Iterable[str], folder: Path) -> dict[str, Path]:
    """Return what each program reads: the model's directory, or of llama.cpp a file in its width."""
    found = dict.fromkeys(names, model)
    if of_llama_cpp := [name for name in found if PROGRAMS[name].needs == "llama_cpp"]:
        import gguf_file

        wide = folder / f"{model.name}.gguf"
        gguf_file.write(model, wide)
        for name in of_llama_cpp:
            width = name.split()[1]
            found[name] = folder / f"{model.name}-{width}.gguf"
            gguf_file.narrow(wide, found[name], width)
    return found


def measured(weights: dict[str, Path], rows: int, context: int, blocks: int, steps: int, bandwidth: float) -> dict:
    """Return the case of so many sequences: for each program its facts and its times. Exits where a program fails."""
    sizes = ["--rows", str(rows), "--context", str(context), "--worker"]
    commands = {name: [sys.executable, __file__, str(path), *sizes, name] for name, path in weights.items()}
    worked = interleave.run_or_exit(commands, steps, blocks)
    own: dict[int, list[float]] = {}  # by bits, of the fastest
    for name, done in worked.items():
        bits = PROGRAMS[name].bits
        if PROGRAMS[name].needs == "jaxlm":
            own[bits] = min(own.get(bits, done.step_s), done.step_s, key=statistics.median)
    found: dict[str, Any] = {"rows": rows, "context": context}
    for name, done in worked.items():
        program, facts = PROGRAMS[name], done.facts
        row = {"bits": program.bits, **facts, **interleave.row(done.step_s, rows, None)}
        del row["jaxlm_over_this"]
        line = f"  {name}: {1e3 * row['median_step_s']:.1f} ms"
        if program.needs != "jaxlm" and program.bits in own:
            ratio = statistics.median(map(operator.truediv, own[program.bits], done.step_s))
            row["best_jaxlm_over_this"] = ratio
            line += f"; the fastest of ours of as many bits takes {ratio:.2f} of its time"
        elif facts.get("bytes_per_token") is not None:
            cached = rows * (context + steps * (blocks + 1) // 2) * facts["bytes_per_token"]
            row["read_bound_s"] = (facts["weight_bytes"] + cached) / bandwidth
            line += f", read in {1e3 * row['read_bound_s']:.1f}"
        print(line, flush=True)
        found[name] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--rows", default="1,8", help="sequences, one or several numbers (%(default)s)")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompts (%(default)s)")
    parser.add_argument("--programs", help="some of all, between commas: " + ", ".join(PROGRAMS))
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="in each block")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--worker", choices=PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    accelerators.choose()
    rows = [int(each) for each in arguments.rows.split(",")]
    if arguments.worker:
        steps = PROGRAMS[arguments.worker].steps
        return interleave.serve(lambda: steps(Path(arguments.models[0]), rows[0], arguments.context))
    names = arguments.programs.split(",") if arguments.programs else list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"--programs: there is no {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    names = [name for name in names if importlib.util.find_spec(PROGRAMS[name].needs)]
    from jaxlm.inference.measured import read_bytes_per_s

    bandwidth, cases = read_bytes_per_s(), []
    for asked in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(asked, Path(folder)) if asked in MODELS else Path(asked)
            weights = weights_of(model, names, Path(folder))
            for count in rows:
                print(f"{model.name}, {count} sequences of {arguments.context} tokens", flush=True)
                sizes = count, arguments.context, arguments.blocks, arguments.steps
                cases.append({"model": model.name, **measured(weights, *sizes, bandwidth)})
    described = {"steps_per_block": arguments.steps, "read_bytes_per_s": bandwidth}
    print(results.write("decode", results.cpu(), {**described, "cases": cases}, arguments.out))


if __name__ == "__main__":
    main()
