"""One process of two, which loads a Hugging Face directory onto a mesh over both and tells what it read of the file.

    python reading.py INDEX HOST:PORT HF_DIR

Prints {"opened": names of tensors, "taken": {name: [[bytes, first, last] of each part that was copied]}}.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from numpy.lib.array_utils import byte_bounds

from jaxlm.families.directory import PublishedModel
from jaxlm.families.safetensors import StoredTensor
from jaxlm.models.tree import paths
from jaxlm.parallel import devices, processes
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.rules import TRAIN

read = StoredTensor.read
opened: list[int] = []
taken: dict[int, list[tuple[int, int, int]]] = {}


class TracedNumbers(np.ndarray):
    """Numbers of a file. `tensor`: where its tensor begins in the file, and in memory."""

    tensor: tuple[int, int]

    def __array_finalize__(self, of):
        self.tensor = getattr(of, "tensor", (0, 0))

    def astype(self, *arguments, **options):
        """Copy the numbers, and note which bytes of the tensor they are."""
        offset, origin = self.tensor
        first, last = (address - origin for address in byte_bounds(self))
        taken.setdefault(offset, []).append((self.nbytes, first, last))
        return np.asarray(self).astype(*arguments, **options)


def traced(tensor: StoredTensor) -> np.ndarray:
    """Return what `StoredTensor.read` does, traced."""
    opened.append(tensor.offset)
    numbers = read(tensor).view(TracedNumbers)
    numbers.tensor = tensor.offset, numbers.ctypes.data
    return numbers


def main(index: str, address: str, folder: str) -> None:
    processes.join(processes.ProcessSpec(int(index), 2, address))
    mesh = make_mesh(Layout(tensor=2), devices.start(2))
    model = PublishedModel(Path(folder))
    StoredTensor.read = traced
    found = paths(model.load(mesh, TRAIN))
    StoredTensor.read = read
    for path, whole in paths(model.load(make_mesh(Layout(), jax.local_devices()), TRAIN)).items():
        for shard in found[path].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(whole)[shard.index], path)
    names = {tensor.offset: name for name, tensor in model.stored.items()}
    parts = {names[offset]: each for offset, each in taken.items()}
    print(json.dumps({"opened": [names[offset] for offset in opened], "taken": parts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
