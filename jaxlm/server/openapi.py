"""The OpenAPI document of a server, made from the types of its bodies and answers."""

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from jaxlm import __version__
from jaxlm.server.endpoints import PREFIX, Endpoint
from jaxlm.server.models import ModelEntry, ModelList
from jaxlm.server.refusals import ErrorAnswer
from jaxlm.server.served import ServedModel
from jaxlm.server.tokens import TokenizerInfo

_REFUSED = {
    "400": "What is asked is wrong, or not supported.",
    "401": "A key is missing or wrong.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "415": "The body is no JSON.",
    "429": "The queue is full.",
    "500": "The model has failed.",
    "503": "The server ends.",
    "504": "The request took too long.",
}


def document(served: ServedModel, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the document, of OpenAPI 3.1."""
    endpoints = list(endpoints)
    types: list[Any] = [each for one in endpoints for each in (one.takes, one.gives, one.streams) if each is not None]
    types += [ModelList, ModelEntry, TokenizerInfo, ErrorAnswer]
    schemas, shared = TypeAdapter.json_schemas(
        [(each.__name__, "validation", TypeAdapter(each)) for each in dict.fromkeys(types)],
        ref_template="#/components/schemas/{model}",
    )

    for each in shared.get("$defs", {}).values():
        if "model" in each["properties"] and each.get("additionalProperties") is False:  # of a request
            model = each["properties"]["model"]
            model["enum"] = [*(each.name for each in served.all), *([None] if "anyOf" in model else [])]

    def content(kind: type, media: str = "application/json") -> dict[str, Any]:
        return {media: {"schema": schemas[kind.__name__, "validation"]}}

    def answers(gives: type, streams: type | None = None, refused: Iterable[str] = _REFUSED) -> dict[str, Any]:
        contents = content(gives)
        if streams:
            chunk = schemas[streams.__name__, "validation"]
            data = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
            event = {"type": "object", "properties": {"data": data, "event": {"type": "string"}}, "required": ["data"]}
            contents |= {"text/event-stream": {"schema": event}}
        failed = {status: {"description": _REFUSED[status], "content": content(ErrorAnswer)} for status in refused}
        return {"200": {"description": (gives.__doc__ or "").split("\n")[0], "content": contents}, **failed}

    paths: dict[str, Any] = {}
    for one in endpoints:
        body = {"required": True, "content": content(one.takes)}
        paths[PREFIX + one.path] = {
            "post": {
                "summary": (one.takes.__doc__ or "").split("\n")[0],
                "requestBody": body,
                "responses": answers(one.gives, one.streams),
            }
        }
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths[f"{PREFIX}/models"] = {"get": {"summary": "The models.", "responses": answers(ModelList, refused=("401",))}}
    paths[PREFIX + "/models/{name}"] = {
        "get": {"summary": "A model.", "parameters": [name], "responses": answers(ModelEntry, refused=("401", "404"))}
    }
    paths[f"{PREFIX}/tokenizer_info"] = {
        "get": {"summary": "The tokenizer.", "responses": answers(TokenizerInfo, refused=("401",))}
    }
    described_version = {"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}
    paths[f"{PREFIX}/version"] = {
        "get": {
            "summary": "The version of jaxlm.",
            "responses": {
                "200": {
                    "description": "The version.",
                    "content": {"application/json": {"schema": described_version}},
                },
                "401": {"description": _REFUSED["401"], "content": content(ErrorAnswer)},
            },
        }
    }
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"jaxlm serves {served.name}", "version": __version__},
        "paths": paths,
        "components": {"schemas": shared.get("$defs", {})},
    }
    if served.keys:
        description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"key": []}]
    return description
