"""Post-processors of a tokenizer.json, which put special tokens around a text. Imports no JAX."""

import json
from typing import Any

import tokenizers as library


def template(token: str, number: int) -> dict[str, Any]:
    """Return the post-processor of a tokenizer.json that puts one token before every text."""
    special, first, second = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        *({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB")),
    )
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def ids_around(backend: library.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor of a tokenizer puts before a text, and those that it puts after it."""
    if backend.post_processor is None:
        return [], []
    return _ids_around(json.loads(backend.post_processor.__getstate__()))


def _ids_around(described: dict[str, Any]) -> tuple[list[int], list[int]]:
    begin: list[int] = []
    end: list[int] = []
    match described:
        case {"type": "Sequence", "processors": processors}:  # the later ones put theirs around the earlier ones'
            for before, after in map(_ids_around, processors):
                begin, end = before + begin, end + after
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, first], "sep": [_, last]}:
            begin, end = [first], [last]
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": tokens}:
            ids = [tokens[piece["SpecialToken"]["id"]]["ids"] if "SpecialToken" in piece else None for piece in pieces]
            texts = [place for place, of_piece in enumerate(ids) if of_piece is None] or [len(ids)]
            begin = [number for of_piece in ids[: texts[0]] for number in of_piece]
            end = [number for of_piece in ids[texts[-1] + 1 :] for number in of_piece]
    return begin, end
