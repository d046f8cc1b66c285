"""The published model that tells stories, with fewer layers: where its story does not matter."""

import json
import re
import shutil
from pathlib import Path

from jaxlm.families import safetensors
from jaxlm.families.directory import PublishedModel
from jaxlm.families.safetensors import LazyTensor

STORIES = Path(__file__).parent / "families" / "stories260K"


def shallow(folder: Path, layers: int = 1) -> Path:
    """Write a copy with its first layers to a new folder. Return that."""
    shutil.copytree(STORIES, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((STORIES / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    tensors = {}
    for name, tensor in PublishedModel(STORIES).stored.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < layers:
            tensors[name] = LazyTensor(tensor.dtype, tensor.shape, tensor.read)
    safetensors.write(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder
