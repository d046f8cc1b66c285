"""A run whose matrices are quantised, made of the weights of another model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxlm.config import mesh_layout
from jaxlm.config.experiment import Experiment
from jaxlm.core import copies
from jaxlm.core.addresses import with_addresses
from jaxlm.core.files import replace
from jaxlm.runs.conversion import check_new
from jaxlm.runs.folder import Run
from jaxlm.runs.job_folder import write_files
from jaxlm.runs.source import ModelSource, WeightsRequest
from jaxlm.training.paths import written_apart

if TYPE_CHECKING:
    from jax.sharding import Mesh


class QuantizedRun(NamedTuple):
    """The form of a model that was quantised, its parameters, and the bytes of its weights."""

    quantize: str
    parameters: int
    bytes: int


def check_free(out: Path) -> None:
    """Raise InputError where a run cannot be made in a folder."""
    Run(out).paths.check_name()
    check_new(out)


def quantize(source: ModelSource, experiment: Experiment, out: Path, request: "WeightsRequest") -> QuantizedRun:
    """Make a run of the weights that are requested: quantised, and for the rest as they are stored.

    Raises InputError where the weights are not whole, and where the folder is taken.
    """
    import jax

    from jaxlm.models.tree import parameter_count
    from jaxlm.training import checkpoints

    quantization = request.quantized
    assert quantization is not None
    check_free(out)
    run = Run(out)
    step, parameters = source.weights.restore(request)
    write_files(source.weights.sidecar_files(), run.paths.huggingface)
    source.weights.origin(step).save(run.paths.origin)
    changes: dict[str, object] = {"lora": None}
    if source.text.has_tokenizer:
        run.paths.tokenizer.write_bytes(source.text.tokenizer_file.read_bytes())
        changes["data"] = experiment.data.model_copy(update={"tokenizer": with_addresses(run.paths.tokenizer)})
    checkpoints.save_parameters(run.paths.checkpoints, parameters)
    replace(run.paths.quantized, json.dumps(quantization._asdict()) + "\n")
    replace(run.paths.config, experiment.model_copy(update=changes).to_toml())  # last: it makes the folder a run
    copies.push(run.paths.directory, leave_out=written_apart)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    return QuantizedRun(str(quantization), parameter_count(experiment.model), size)


def mesh_for(experiment: Experiment) -> "Mesh":
    """Return the mesh that weights are read on: that of inference."""
    from jaxlm.parallel.devices import mesh_here

    return mesh_here(1, lambda devices: mesh_layout.layout(experiment, devices, "decode"))
