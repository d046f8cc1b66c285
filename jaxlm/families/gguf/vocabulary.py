"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face directory."""

import json
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.families.files import GENERATION, SENTENCEPIECE, TOKENIZER, TOKENIZER_CONFIG
from jaxlm.families.gguf.reader import GgufFile
from jaxlm.families.vocabularies import byte_level, conversion, gpt2, protobuf, tiktoken
from jaxlm.families.vocabularies.byte_level import Splitting
from jaxlm.families.vocabularies.sentencepiece import PieceKind

_PREFIX = "tokenizer.ggml."
_DIGITS = Splitting(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
)  # GPT-2's, with each digit by itself
# By `tokenizer.ggml.pre`, which names the pattern that llama.cpp has in code.
_MERGED = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais"), gpt2.GPT2),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), gpt2.QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), _DIGITS),
}
_RANKED = ("llama-bpe", "llama3", "llama-v3")  # ids are the ranks of tiktoken


def files(file: GgufFile) -> dict[str, bytes]:
    """Return the tokenizer's files by name: in a file without a tokenizer, of ids alone.

    Raises InputError for a tokenizer that jaxlm does not read, or that is broken.
    """
    metadata = {key.removeprefix(_PREFIX): value for key, value in file.metadata.items() if key.startswith(_PREFIX)}
    names = metadata.get("tokens")
    settings, generation = _special(metadata, names if isinstance(names, list) else [])
    contents: dict[str, bytes] = {GENERATION: _json(generation)} if generation else {}
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        contents["chat_template.jinja"] = template.encode()
    kind = metadata.get("model")
    if kind in (None, "no_vocab", "none"):
        return contents
    kinds = metadata.get("token_type")
    if not isinstance(names, list) or not isinstance(kinds, list) or len(names) != len(kinds):
        raise InputError(f"{file.path} has a tokenizer without a list of tokens and of their types")
    try:
        tokenizer = {"llama": _pieces, "gpt2": _byte_pairs}[kind](metadata, names, kinds)
    except KeyError:
        raise InputError(f"{file.path} has a tokenizer of kind {kind!r}, and jaxlm reads llama and gpt2") from None
    except InputError as error:
        raise InputError(f"{file.path}: its tokenizer: {error}") from None
    return contents | tokenizer | {TOKENIZER_CONFIG: _json(settings)}


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=2).encode()


def _special(metadata: dict[str, Any], names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of tokenizer_config.json and of generation_config.json."""
    ids = {
        key: metadata[f"{of}_token_id"]
        for key, of in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{of}_token_id" in metadata
    }
    settings: dict[str, Any] = {
        f"{key}_token": names[number] for key, number in ids.items() if 0 <= number < len(names)
    }
    if "add_bos_token" in metadata:
        settings["add_bos_token"] = metadata["add_bos_token"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    ends = [metadata[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in metadata]
    generation = {f"{key}_token_id": number for key, number in ids.items() if key in ("bos", "pad")}
    return settings, generation | ({"eos_token_id": list(dict.fromkeys(ends))} if ends else {})


def _pieces(metadata: dict[str, Any], names: list[str], kinds: list[int]) -> dict[str, bytes]:
    """Return the file of SentencePiece whose vocabulary a GGUF file has."""
    scores = metadata.get("scores")
    if not isinstance(scores, list) or len(scores) != len(names):
        raise InputError("it has no score of each token")
    message = b"".join(
        protobuf.field(1, protobuf.field(1, name.encode()) + protobuf.field(2, float(score)) + protobuf.field(3, kind))
        for name, score, kind in zip(names, scores, kinds, strict=True)
    )
    has_bytes = PieceKind.BYTE in kinds
    unknown = kinds.index(PieceKind.UNKNOWN) if PieceKind.UNKNOWN in kinds else 0
    begin = metadata.get("bos_token_id", -1) if metadata.get("add_bos_token", True) else -1
    trained = {3: 2, 35: int(has_bytes), 40: unknown, 41: begin}
    normalized = {
        3: int(metadata.get("add_space_prefix", True)), 4: int(metadata.get("remove_extra_whitespaces", False)),
    }  # fmt: skip
    for number, table in ((2, trained), (3, normalized)):
        message += protobuf.field(number, b"".join(protobuf.field(*setting) for setting in table.items()))
    return {SENTENCEPIECE: message}


def _byte_pairs(metadata: dict[str, Any], names: list[str], kinds: list[int]) -> dict[str, bytes]:
    """Return the tokenizer.json of byte-pair encoding over bytes."""
    pre = metadata.get("pre")
    of_kind = {kind: {name: number for number, name in enumerate(names) if kinds[number] == kind} for kind in PieceKind}
    controls = of_kind[PieceKind.CONTROL]
    if pre in _RANKED:
        how = tiktoken.splitting("Llama 3")
        ranks = {byte_level.bytes_of(name): number for name, number in of_kind[PieceKind.NORMAL].items()}
        converted = byte_level.of_ranks(ranks, controls, None, how)
    elif pre in _MERGED:
        merges = [tuple(line.split(" ", 1)) for line in metadata.get("merges", ())]
        if not all(len(pair) == 2 for pair in merges):
            raise InputError("it has a merge that is no pair")
        vocabulary = of_kind[PieceKind.NORMAL] | controls
        converted = byte_level.of_merges(vocabulary, merges, controls, _MERGED[pre])
    else:
        known = ", ".join([*_MERGED, *_RANKED])
        raise InputError(f"how it splits words is called {pre!r} ({_PREFIX}pre), and jaxlm knows {known}")
    conversion.verify(converted, Tokenizer(converted.backend))
    described = json.loads(converted.backend.to_str())
    described["added_tokens"] += [
        {"id": number, "content": name, "special": False, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for name, number in of_kind[PieceKind.USER_DEFINED].items()
    ]
    return {TOKENIZER: _json(described)}
