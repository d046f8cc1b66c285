"""GPT-2's vocab.json and merges.txt, which others have too, with a pattern of their own."""

from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.data.control_tokens import END_OF_TEXT
from jaxlm.families.vocabularies import byte_level
from jaxlm.families.vocabularies.byte_level import Splitting
from jaxlm.families.vocabularies.conversion import Conversion, table_in

GPT2 = Splitting("")
QWEN2 = Splitting(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    nfc=True,
)
# By `tokenizer_class` in tokenizer_config.json, which says what no file does.
_SPLITTINGS = {None: GPT2, "GPT2Tokenizer": GPT2, "CodeGenTokenizer": GPT2, "Qwen2Tokenizer": QWEN2}


def convert(vocabulary: bytes, merges: bytes, kind: Any) -> Conversion:
    """Convert a vocab.json and its merges.txt.

    Args:
      kind: `tokenizer_class` in tokenizer_config.json, or None.

    Raises InputError for files that are broken, and for a class that is not known.
    """
    key = kind.removesuffix("Fast") if isinstance(kind, str) else kind
    if (how := _SPLITTINGS.get(key)) is None:
        known = ", ".join(filter(None, _SPLITTINGS))
        raise InputError(f"it is of tokenizer_class {kind!r}, whose pattern is in code; jaxlm knows {known}")
    try:
        id_of, lines = table_in(vocabulary), merges.decode().split("\n")
    except UnicodeDecodeError:
        raise InputError("the merges beside it are not UTF-8") from None
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in id_of.values()):
        raise InputError("it has ids that are no numbers")
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip().partition(" ")
        pairs.append((left, right))
    specials = [END_OF_TEXT] if END_OF_TEXT in id_of else []
    return byte_level.of_merges(id_of, pairs, specials, how)
