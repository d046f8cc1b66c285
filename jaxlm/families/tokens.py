"""The tokenizer of a published model, with the ids that begin its prompts and end what it writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers as library

from jaxlm.core.errors import InputError
from jaxlm.data import tokenizers
from jaxlm.data.tokenizers import Tokenizer


def load(file: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Tokenizer:
    """Load a published `tokenizer.json`.

    A prompt begins with the ids that the file's post-processor puts before a text. What is drawn ends with the ids of
    `eos_token_id`, one or several, in generation_config.json or else in config.json. Raises InputError for a file that
    is missing or invalid.
    """
    plain = tokenizers.load(file)
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) for token in ends):
        raise InputError(f"eos_token_id = {found!r} beside {file} is no id, nor a list of ids")
    begin = library.Tokenizer.from_file(str(file)).encode("", add_special_tokens=True).ids
    while begin and begin[-1] in ends and begin[-1] != config.get("bos_token_id"):
        begin.pop()
    return tokenizers.load(file, begin, ends or plain.ends)
