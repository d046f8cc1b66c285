"""The model that draws the drafts of a decoding step."""

from typing import NamedTuple

from jaxlm import config
from jaxlm.models.config import ModelConfig


class PlannedDraftModel(NamedTuple):
    """A model that draws drafts, with the width of its matrices (`execution.quantize`, `execution.quantize_group`)."""

    model: ModelConfig
    quantize: str
    quantize_group: int


def planned_draft_model(source: str) -> PlannedDraftModel:
    """Return the draft model of a configuration, a run or a published model. Raises InputError for what is none."""
    experiment = config.load(source, (), "decode")
    return PlannedDraftModel(experiment.model, experiment.execution.quantize, experiment.execution.quantize_group)
