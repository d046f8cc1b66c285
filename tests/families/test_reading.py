"""Reading of published weights: the memory that it takes, and how much of the file each process reads."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from matrices import sampled

from jaxlm.families.directory import PublishedModel

FOLDER = Path(__file__).parent
PUBLISHED = FOLDER / "stories260K"


@pytest.mark.slow
def test_each_of_two_processes_reads_what_its_devices_hold():
    """Over tensor = 2: half of the rows of `up_proj`, half of each row of `down_proj`, the norms whole."""
    address = f"127.0.0.1:{runs.free_port()}"
    command = [sys.executable, str(FOLDER / "reading.py")]
    started = [
        subprocess.Popen(
            [*command, str(index), address, str(PUBLISHED)], stdout=subprocess.PIPE, text=True, env=runs.environment()
        )
        for index in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert not any(process.returncode for process in started)
    stored = PublishedModel(PUBLISHED).stored
    for index, report in enumerate(map(json.loads, said)):
        assert sorted(report["opened"]) == sorted(stored)  # each once
        for name, tensor in stored.items():
            size = tensor.dtype.itemsize * math.prod(tensor.shape)
            number, first, last = zip(*report["taken"][name], strict=True)
            assert sum(number) == (size if "norm" in name else size // 2), name
            if any(part in name for part in ("embed", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                assert (min(first), max(last)) == (index * size // 2, (index + 1) * size // 2), name


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells anonymous memory apart")
@pytest.mark.parametrize("case", sampled(["load", "load float32"], ["load float32"]))
def test_memory_is_that_of_the_shards_and_one_tensor(case, tmp_path, monkeypatch):
    """On eight devices, of 0.2 GB; the program of `benchmarks` measures 4 GB. Seen are 0.02 to 0.05 of the largest
    tensor; a whole stack of layers beside its shards, as it was once, is over 1.2."""
    monkeypatch.syspath_prepend(str(FOLDER.parents[1] / "benchmarks"))
    import import_memory

    total = import_memory.write_checkpoint(tmp_path, layers=3, width=1024, shard_bytes=100_000_000)
    found = import_memory.measure(case, tmp_path, tmp_path)
    assert 0 <= found["shards_bytes"] - (2 if "float32" in case else 1) * total < 0.01 * total  # norms are on each
    assert -0.1 < found["beyond_shards_over_largest_tensor"] <= import_memory.MARGIN
