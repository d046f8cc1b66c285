"""/v1/models: the model that is served, and its adapters."""

from typing import Literal

from typing_extensions import TypedDict

from jaxlm.server.served import ServedModel


class CountedCost(TypedDict):
    """The counted cost of a token after `context` others, drawn alone: model FLOPs, bytes that are read at least, and
    the seconds that it takes at least on these chips, where they are known."""

    context: int
    flops: int
    read_bytes: int
    bound_s: float | None


class ModelEntry(TypedDict):
    """A model: its name, when it was loaded, the most tokens of a text, the form of quantised matrices, what a token
    costs, and of an adapter the name of the model that it is beside."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    quantize: str | None
    counted: CountedCost | None
    parent: str | None


class ModelList(TypedDict):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelEntry]


def model_entry(served: ServedModel, base: ServedModel) -> ModelEntry:
    """Return the entry of a model, which may be one with an adapter of a base."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "jaxlm",
        "max_model_len": served.longest,
        "quantize": served.quantize,
        "counted": served.cost and {**served.cost._asdict()},  # type: ignore[typeddict-item]
        "parent": None if served.adapter is None else base.name,
    }


def models_list(served: ServedModel) -> ModelList:
    """Return the list of the model and its adapters."""
    return {"object": "list", "data": [model_entry(each, served) for each in served.all]}
