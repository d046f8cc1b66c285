"""Measure the time and host memory of compiling large models' steps for absent chips.

    python benchmarks/compile_targets.py [NAME …]

Runs `jaxlm compile` for each case in a separate process, and writes results/<this machine>/compile_targets.json, or
compile_targets-mixtures.json for models with experts, after each. With names, only cases that start with one of them
run, and the other rows stay; the compilers must be those that the file was recorded with.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import results

MODELS = Path(__file__).parents[1] / "configs/models"
USUAL_SETTINGS = ["training.sequence=4096", "execution.remat=full"]
LLAMA = {
    **{
        f"llama3.1-8b on {chips}": ["llama3.1-8b.toml", "--on", chips, *USUAL_SETTINGS]
        for chips in (
            "tpu-v5e:16x16",
            "tpu-v5p:4x4x4",
            "tpu-v6e:16x16",
            "tpu-v7x:4x4x4",
            "h200-sxm:8",
            "h100-sxm5:64",
            "tpu-v5p:16x16x16",
        )
    },
    "llama3.1-8b on tpu-v6e:16x16, quick": ["llama3.1-8b.toml", "--on", "tpu-v6e:16x16", "--quick", *USUAL_SETTINGS],
    "llama3.1-8b on tpu-v7x:4x4x4, quick": ["llama3.1-8b.toml", "--on", "tpu-v7x:4x4x4", "--quick", *USUAL_SETTINGS],
    "llama3.1-405b on tpu-v5p:8x8x8": ["llama3.1-405b.toml", "--on", "tpu-v5p:8x8x8", *USUAL_SETTINGS],
}
DECODING = ["--workload", "decode"]  # of 64 sequences of 8,192 tokens
MIXTURES = {
    "deepseek-v3 decoding on h200-sxm:16": ["deepseek-v3.toml", "--on", "h200-sxm:16", *DECODING],
    "gpt-oss-20b decoding on h200-sxm:8": ["gpt-oss-20b.toml", "--on", "h200-sxm:8", *DECODING],
    "gpt-oss-20b decoding on tpu-v5p:4x4x4": ["gpt-oss-20b.toml", "--on", "tpu-v5p:4x4x4", *DECODING],
    "gpt-oss-20b on h200-sxm:8": ["gpt-oss-20b.toml", "--on", "h200-sxm:8", *USUAL_SETTINGS],
    "gpt-oss-20b on tpu-v5p:4x4x4": ["gpt-oss-20b.toml", "--on", "tpu-v5p:4x4x4", *USUAL_SETTINGS],
}
FILES = {"compile_targets": LLAMA, "compile_targets-mixtures": MIXTURES}  # by the name of the results file


def run(arguments: list[str]) -> dict:
    """Compile a case; return its reported figures, total and CPU seconds, and the process's peak memory in bytes."""
    config, *rest = arguments
    command = [sys.executable, "-c", "import sys; from jaxlm.cli import main; sys.exit(main())", "compile"]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([*command, str(MODELS / config), *rest, "--json"], stdout=out)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        out.seek(0)
        row = json.loads(out.read() or "{}")
    kept = ("compile_s", "memory_bytes_per_device", "fits", "flops_per_device")
    return {
        "exit_status": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "host_memory_bytes": used.ru_maxrss * 1024,
        **{key: row[key] for key in kept if key in row},
        "largest": row.get("held_at_peak", [])[:3],
        "counted": row.get("counted"),
    }


def main(arguments: list[str] | None = None) -> None:
    known = [name for cases in FILES.values() for name in cases]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"the beginning of one of: {'; '.join(known)}")
    names = parser.parse_args(arguments).names
    if missed := [given for given in names if not any(name.startswith(given) for name in known)]:
        parser.error(f"no case begins with {missed[0]!r}; there are {'; '.join(known)}")
    for file, cases in FILES.items():
        chosen = [name for name in cases if not names or name.startswith(tuple(names))]
        if not chosen:
            continue
        rows = results.compiled_earlier(results.file_of(file, results.cpu()), "rows") if names else {}
        for name in chosen:
            rows[name] = row = run(cases[name])
            print(name, json.dumps({key: row.get(key) for key in ("exit_status", "seconds", "fits")}), flush=True)
            results.write(file, results.cpu(), {"arguments": cases, "rows": rows})


if __name__ == "__main__":
    main()
