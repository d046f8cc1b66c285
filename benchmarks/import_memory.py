"""Measure the host memory that published weights take on their way onto devices, and on their way back.

    python benchmarks/import_memory.py [--layers N] [--mixture]

Writes a checkpoint of Llama's form with random numbers into a temporary folder (4 GB of bfloat16 in shards of 1 GB,
unless there are fewer layers), or of Qwen3-30B-A3B's form with its 18,432 tensors of experts, narrower ones, and beside
it what is made of it: three times its size in all. Each case has a process
of its own, with eight emulated devices, of which this one reads the anonymous memory every two milliseconds: how far
its highest value lies above that once the devices have started. Pages of files, which the system takes back when it
needs them, are not in it. The bound for loading is the arrays' shards and 1.2 times the largest stored tensor.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import results

LAYERS, SHARD_BYTES = 30, 1_000_000_000
MIXTURE = {"layers": 48, "width": 512, "experts": 128}
DEVICES, MESH = 8, {"fsdp": 4, "tensor": 2}
MARGIN = 1.2  # of the largest tensor
EVERY_S = 0.002
CASES = {
    "load": "the arrays as they are stored",
    "load float32": "the arrays in float32, as training begins with them",
    "import": "jaxlm import: arrays as they are stored, and a checkpoint",
    "export": "jaxlm export of that import",
}


def write_checkpoint(
    folder: Path, layers: int = LAYERS, width: int = 2048, experts: int = 0, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write a Hugging Face directory with random finite bfloat16 numbers, and return the bytes of its tensors. With
    `experts` in each layer it is of Qwen3's form."""
    from jaxlm.families import safetensors, table
    from jaxlm.families.family import families
    from jaxlm.families.files import write_json
    from jaxlm.families.safetensors import LazyTensor
    from jaxlm.families.settings import model_of

    config = {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": layers, "num_attention_heads": width // 128, "num_key_value_heads": width // 256,
        "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if experts:
        config |= {
            "model_type": "qwen3_moe", "vocab_size": 151_936, "moe_intermediate_size": 3 * width // 8,
            "num_experts": experts, "num_experts_per_tok": 8, "norm_topk_prob": True,
        }  # fmt: skip
    draw = np.random.default_rng(0)

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        bits = draw.integers(0, 2**16, shape, np.uint16)
        return (bits & 0x81FF | 0x3C00).view(ml_dtypes.bfloat16)  # of any sign and mantissa, and of four exponents

    held = table.tensors(model_of(config, "config.json"), families()[config["model_type"]].rules)
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    tensors = {name: LazyTensor(bfloat16, x.shape, lambda x=x: numbers(x.shape)) for name, x in held.items()}
    files, where = safetensors.shards(tensors, shard_bytes), {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        safetensors.write(folder / name, part, {"format": "pt"})
        where |= dict.fromkeys(part, name)
    write_json(folder / "config.json", config)
    write_json(folder / "model.safetensors.index.json", {"weight_map": where})
    return safetensors.total_bytes(tensors.values())


def work(case: str, model: Path, made: Path) -> None:
    """Be the process that is measured: start the devices, wait for a line, work, and print what is held."""
    import jax

    from jaxlm import api
    from jaxlm.families.directory import PublishedModel
    from jaxlm.parallel import devices
    from jaxlm.parallel.layout import Layout
    from jaxlm.parallel.mesh import make_mesh
    from jaxlm.parallel.rules import TRAIN
    from jaxlm.training import checkpoints  # noqa: F401  # Orbax is no part of what is measured

    mesh = make_mesh(Layout(MESH), devices.start(DEVICES))
    print("ready", flush=True)
    sys.stdin.readline()
    began, parameters = time.perf_counter(), None
    match case:
        case "load":
            parameters = PublishedModel(model).load(mesh, TRAIN)
        case "load float32":
            parameters = PublishedModel(model).load(mesh, TRAIN, "float32")
        case "import":
            api.import_run(model, made / "run")
        case "export":
            api.export(made / "run", made / "exported")
    seconds = time.perf_counter() - began
    held = [shard.data for x in jax.tree.leaves(parameters) for shard in x.addressable_shards]
    if parameters is None:  # they were sharded without a copy, and are gone
        held = [tensor.read() for tensor in PublishedModel(model).stored.values()]
    print(json.dumps({"seconds": round(seconds, 1), "shards_bytes": sum(x.nbytes for x in held)}), flush=True)


def anonymous_bytes(process: int) -> int:
    """Return the resident anonymous memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def measure(case: str, model: Path, made: Path) -> dict[str, Any]:
    """Run a case in a process; return the bytes of the shards that it held, and its peak above its start, also as
    multiples of the largest tensor beyond the shards."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import import_memory as benchmark; "
    code += f"benchmark.work({case!r}, benchmark.Path({str(model)!r}), benchmark.Path({str(made)!r}))"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"{case}: the process did not start")
        baseline = peak = anonymous_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], EVERY_S)[0]:
            peak = max(peak, anonymous_bytes(process.pid))
        if not (said := process.stdout.readline()):
            raise SystemExit(f"{case}: the process failed")
    row = json.loads(said)
    beyond = peak - baseline - row["shards_bytes"]
    return {
        **row,
        "baseline_bytes": baseline,
        "peak_above_baseline_bytes": peak - baseline,
        "beyond_shards_over_largest_tensor": round(beyond / largest_tensor(model), 3),
    }


def largest_tensor(model: Path) -> int:
    """Return the bytes of the largest tensor that is stored."""
    from jaxlm.families.directory import PublishedModel

    return max(tensor.read().nbytes for tensor in PublishedModel(model).stored.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the model ({LAYERS})")
    parser.add_argument("--mixture", action="store_true", help=f"a mixture of experts: {MIXTURE}")
    arguments = parser.parse_args()
    form = MIXTURE if arguments.mixture else {"layers": arguments.layers}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        described = {
            **form,
            "devices": DEVICES,
            "mesh": MESH,
            "tensors_bytes": write_checkpoint(model, **form),
            "largest_tensor_bytes": largest_tensor(model),
        }
        rows = {}
        for case, description in CASES.items():
            rows[case] = {"what": description, **measure(case, model, Path(folder))}
            print(case, json.dumps(rows[case]), flush=True)
    name = "import_memory-mixture" if arguments.mixture else "import_memory"
    print(results.write(name, results.cpu(), {**described, "cases": rows}))


if __name__ == "__main__":
    main()
