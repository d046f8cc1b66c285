"""Control tokens, which stand in no document: text that spells one out stays text."""

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

END_OF_TEXT = "<|endoftext|>"
# Names of control tokens, whatever their file says: DeepSeek's does not call <｜User｜> special.
_NAMED_AS_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
# Document separators of published tokenizers, in order of preference: with <eos> present, </s> is HTML.
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "</s>")


def separator(backend: tokenizers.Tokenizer) -> str | None:
    """Return the token that starts and ends a document, or None."""
    return next((token for token in _SEPARATORS if backend.token_to_id(token) is not None), None)


def for_documents(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that gives no control id for any text, and one encoding for each text.

    Control tokens are the special tokens, added ones with names such as <|user|>, the separator, the unknown token and,
    with byte fallback, the names of bytes. Where the model itself can make one from text (Unigram; BPE with
    `ignore_merges`), the pre-tokenizer cuts the text after its first character. BPE dropout is switched off. The result
    is the argument itself if nothing changes.
    """
    described = json.loads(backend.to_str())
    before = json.dumps(described)
    model = described["model"]
    controls = _controls(described, separator(backend))
    for token in described["added_tokens"]:
        token["special"] |= token["content"] in controls
    if model.get("dropout"):
        model["dropout"] = None
    if from_text := controls & _made_of_text(model, backend):
        before_cut, cut = steps(described["pre_tokenizer"]), _cut(from_text)
        if cut not in before_cut:
            described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*before_cut, cut]}
    after = json.dumps(described)
    return backend if after == before else tokenizers.Tokenizer.from_str(after)


def _controls(described: dict[str, Any], separator: str | None) -> set[str]:
    model = described["model"]
    unknown = model.get("unk_token")
    if model.get("unk_id") is not None:
        unknown = model["vocab"][model["unk_id"]][0]
    added = described["added_tokens"]
    special = (t["content"] for t in added if t["special"] or _NAMED_AS_CONTROL.fullmatch(t["content"]))
    found = {separator, unknown, *special}
    if model.get("byte_fallback"):
        found |= {f"<0x{byte:02X}>" for byte in range(256)}
    return {token for token in found if token and len(token) > 1}  # a single character is a letter of the text


def _made_of_text(model: dict[str, Any], backend: tokenizers.Tokenizer) -> set[str]:
    """Return the tokens of several characters that the model makes where a word spells them out."""
    if model["type"] == "BPE" and not model["ignore_merges"]:
        prefix = model["continuing_subword_prefix"] or ""
        return {left + right.removeprefix(prefix) for left, right in model["merges"]}
    return set(backend.get_vocab(with_added_tokens=False))


def steps(described: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer or decoder of a tokenizer.json, sequences taken apart."""
    if described is None:
        return []
    within = described.get("pretokenizers", described.get("decoders"))
    return [described] if within is None else [step for part in within for step in steps(part)]


def _cut(tokens: Iterable[str]) -> dict[str, Any]:
    """Describe a pre-tokenizer that cuts each of these tokens after its first character."""
    rests: dict[str, list[str]] = {}
    for token in sorted(tokens):
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    pattern = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "MergedWithPrevious", "invert": False}
