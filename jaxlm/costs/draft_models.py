"""The model that draws the drafts of a decoding step."""

from typing import NamedTuple

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.models.config import ModelConfig

# Vocabularies of one tokenizer differ by how far each model pads its tables.
_PADDING = 1024


class PlannedDraftModel(NamedTuple):
    """A model that draws drafts, with the width of its matrices (`execution.quantize`, `execution.quantize_group`)."""

    model: ModelConfig
    quantize: str
    quantize_group: int


def planned_draft_model(source: str, of: ModelConfig) -> PlannedDraftModel:
    """Return the draft model of a configuration, a run or a published model, for a model.

    Raises InputError for what is none, and for a vocabulary that cannot have the same tokens.
    """
    experiment = config.load(source, (), "decode")
    model, execution = experiment.model, experiment.execution
    if abs(model.vocab_size - of.vocab_size) >= _PADDING:
        raise InputError(
            f"{source} has model.vocab_size = {model.vocab_size}, and not the tokens of a model of {of.vocab_size}: "
            "drafts need a model of the same tokenizer"
        )
    return PlannedDraftModel(model, execution.quantize, execution.quantize_group)
