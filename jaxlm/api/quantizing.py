"""A model kept with quantised matrices, and its loss before and after."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxlm.core.addresses import place

if TYPE_CHECKING:
    from jaxlm.models.quantize_config import QuantizeKind
    from jaxlm.training.display import Display
    from jaxlm.training.evaluation import Evaluation


class QuantizedModel(NamedTuple):
    """A model that was quantised.

    Attributes:
      quantize: the form of its matrices.
      parameters: their number, as before.
      bytes: of all weights, as they are kept.
      before, after: the loss on the text, in float32 or the dtype that the model computes in.
    """

    quantize: str
    parameters: int
    bytes: int
    before: "Evaluation"
    after: "Evaluation"

    def row(self) -> dict[str, Any]:
        """Return the figures, losses as `jaxlm eval` gives them."""
        return {**self._asdict(), "before": self.before.row(), "after": self.after.row()}


def quantize(
    model: str | Path,
    run: str | Path,
    *,
    to: "QuantizeKind",
    data: str,
    group: int | None = None,
    checkpoint: Literal["newest", "best"] = "newest",
    average: bool = False,
    display: "Display | None" = None,
    say: Callable[[str], None] = lambda line: None,
) -> QuantizedModel:
    """Make a run of a model whose matrices of layers are quantised, as `execution.quantize` does when a model is
    loaded, and measure both on a text.

    Args:
      model: a run, a Hugging Face directory, or hf:ORG/NAME of the Hub.
      run: the folder to make.
      to: "int8", "w8a8", "int4", "fp8" or "mxfp4".
      data: a file, directory or glob of text.
      group: inputs that share a scale (`execution.quantize_group`).
      checkpoint, average: as in `load`.
      display: shows the progress of measuring.
      say: takes a line about what is odd.

    Raises InputError as `load` and `LoadedModel.evaluate` do, and where the folder is taken.
    """
    from jaxlm import api
    from jaxlm.parallel.rules import FORWARD
    from jaxlm.runs import quantization
    from jaxlm.runs.source import WeightsRequest

    quantization.check_free(place(run))
    options: dict[str, Any] = {"checkpoint": checkpoint, "average": average, "workload": "train", "say": say}
    before = api.load(model, ["execution.quantize=none"], **options).evaluate(data, display)
    changes = [f"execution.quantize={to}"] + [f"execution.quantize_group={group}"] * (group is not None)
    source, experiment = (loaded := api.load(model, changes, **options)).source, loaded.experiment
    mesh = quantization.mesh_for(experiment)
    asked = checkpoint, average, say, experiment.execution.quantization
    request = WeightsRequest(experiment.model, mesh, FORWARD, None, *asked)
    kept = quantization.quantize(source, experiment, place(run), request)
    after = api.load(run, dtype=loaded.dtype, workload="train", say=say).evaluate(data, display)
    return QuantizedModel(*kept, before, after)
