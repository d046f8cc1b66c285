"""Mistral's tekken.json: special tokens have the first ids, and the ranks of byte strings come after them."""

import base64
import binascii
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.families.vocabularies import byte_level
from jaxlm.families.vocabularies.byte_level import MOST_TOKENS, Splitting
from jaxlm.families.vocabularies.conversion import Conversion, table_in

# Of files of version v7 and before that name none.
_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_FILLER = "<SPECIAL_{}>"
_BEGIN = "<s>"


def convert(content: bytes) -> Conversion:
    """Convert a tekken.json. Raises InputError for a broken file."""
    found = table_in(content)
    config, vocabulary, specials = found.get("config"), found.get("vocab"), found.get("special_tokens")
    if not isinstance(config, dict) or not isinstance(vocabulary, list):
        raise InputError("it has no table config and list vocab")
    pattern = config.get("pattern")
    size, reserved = (config.get(key) for key in ("default_vocab_size", "default_num_special_tokens"))
    if not (isinstance(pattern, str) and pattern and isinstance(size, int) and isinstance(reserved, int)):
        raise InputError("it has no config of pattern, default_vocab_size and default_num_special_tokens")
    if not 0 <= reserved <= size <= min(MOST_TOKENS, reserved + len(vocabulary)):
        raise InputError(f"it has not the {size:,} tokens that it says, {reserved:,} of them special")
    names = _names(specials, reserved)
    ranks = {_bytes(entry, rank): reserved + rank for rank, entry in enumerate(vocabulary[: size - reserved])}
    begin = _BEGIN if _BEGIN in names else None
    return byte_level.of_ranks(ranks, names, begin, Splitting(pattern))


def _names(specials: Any, reserved: int) -> dict[str, int]:
    """Return the ids of the special tokens by name; reserved ids get a filler name."""
    if specials is None:
        names = dict(enumerate(_SPECIALS))
    elif isinstance(specials, list) and all(isinstance(entry, dict) for entry in specials):
        names = {entry.get("rank"): entry.get("token_str") for entry in specials}
    else:
        names = {}
    texts = all(isinstance(text, str) and text for text in names.values())
    if not names or not texts or not {*names} <= {*range(reserved)} or len({*names.values()}) != len(names):
        raise InputError(f"it has special tokens that are not {reserved:,} or fewer of different names and ranks")
    fillers = {number: _FILLER.format(number) for number in range(reserved) if number not in names}
    return {text: number for number, text in sorted({**names, **fillers}.items())}


def _bytes(entry: Any, rank: int) -> bytes:
    try:
        if entry["rank"] == rank and (token := base64.b64decode(entry["token_bytes"], validate=True)):
            return token
    except (TypeError, LookupError, ValueError, binascii.Error):
        pass
    raise InputError(f"it has no byte string in base64 with rank {rank} at its place")
