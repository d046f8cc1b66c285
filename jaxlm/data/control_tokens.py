"""Control tokens, which stand in no document: text that spells one out stays text."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models

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
    `ignore_merges`), the pre-tokenizer cuts the text where the model without control tokens begins its second token.
    BPE dropout is switched off. The result is the argument itself if nothing changes.
    """
    described = json.loads(backend.to_str())
    before = json.dumps(described)
    model = described["model"]
    controls = _controls(described, separator(backend))
    for token in described["added_tokens"]:
        token["special"] |= token["content"] in controls
    if model.get("dropout"):
        model["dropout"] = None
    if cuts := {*_cuts(model, backend, controls)}:
        before_cut, cut = steps(described["pre_tokenizer"]), _cut(cuts)
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


class TokenCut(NamedTuple):
    """The place at which a text that spells out a control token is cut: between two parts of it.

    `whole_word`: only where a word of the pre-tokenizer is the token."""

    left: str
    right: str
    whole_word: bool


def _cuts(model: dict[str, Any], backend: tokenizers.Tokenizer, controls: set[str]) -> Iterator[TokenCut]:
    """Yield a cut for each control token of several characters that the model makes where a text spells it out."""
    made_by: dict[str, int] = {}
    whole_word = False
    if model["type"] == "BPE":
        prefix = model["continuing_subword_prefix"] or ""
        for left, right in model["merges"]:
            made_by.setdefault(left + right.removeprefix(prefix), len(left))
        whole_word = model["ignore_merges"]
    known = backend.get_vocab(with_added_tokens=False)
    others = None
    for token in sorted(controls):
        if token in made_by:
            yield TokenCut(token[: made_by[token]], token[made_by[token] :], whole_word=False)
        elif token in known and (whole_word or model["type"] != "BPE"):
            others = others or _without(model, backend, controls)
            yield _cut_of(token, others, controls, whole_word)


def _without(model: dict[str, Any], backend: tokenizers.Tokenizer, controls: set[str]) -> models.Model:
    """Return a model that does not make control tokens of text."""
    if model["type"] == "Unigram":
        pieces = [("\0" if text in controls else text, score) for text, score in model["vocab"]]
        return models.Unigram(pieces, model["unk_id"], model["byte_fallback"])
    others = tokenizers.Tokenizer.from_str(backend.to_str()).model
    if model["type"] == "BPE":
        others.ignore_merges = False
    return others


def _cut_of(token: str, others: models.Model, controls: set[str], whole_word: bool) -> TokenCut:
    """Return the first cut between tokens of the other model, else between characters, with no control token left."""
    ends = [len(token.encode()[: part.offsets[1]].decode(errors="ignore")) for part in others.tokenize(token)]
    for at in (*ends, *range(1, len(token))):
        if 0 < at < len(token) and not controls & {token[:at], token[at:]}:
            return TokenCut(token[:at], token[at:], whole_word)
    return TokenCut(token[:1], token[1:], whole_word)


def steps(described: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer or decoder of a tokenizer.json, sequences taken apart."""
    if described is None:
        return []
    within = described.get("pretokenizers", described.get("decoders"))
    return [described] if within is None else [step for part in within for step in steps(part)]


def _cut(cuts: Iterable[TokenCut]) -> dict[str, Any]:
    """Describe a pre-tokenizer that makes these cuts. Each match is the one character before a cut."""
    rights: dict[tuple[str, bool], list[str]] = {}
    for left, right, whole_word in sorted(cuts):
        rights.setdefault((left, whole_word), []).append(re.escape(right))
    patterns = []
    for (left, whole_word), rest in rights.items():
        start, end = (r"\A", r"\z") if whole_word else ("", "")
        patterns.append(f"{re.escape(left[-1])}(?<={start}{re.escape(left)})(?=(?:{'|'.join(rest)}){end})")
    pattern = "|".join(patterns)
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "MergedWithPrevious", "invert": False}
