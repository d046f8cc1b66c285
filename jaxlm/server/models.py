"""/v1/models: the model that is served."""

from typing import Literal

from typing_extensions import TypedDict

from jaxlm.server.served import ServedModel


class ModelEntry(TypedDict):
    """A model: its name, when it was loaded, and the most tokens of a text."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelEntry]


def model_entry(served: ServedModel) -> ModelEntry:
    """Return the entry of a model."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "jaxlm",
        "max_model_len": served.longest,
    }


def models_list(served: ServedModel) -> ModelList:
    """Return the list of the one model."""
    return {"object": "list", "data": [model_entry(served)]}
