"""The small files of a Hugging Face directory. Imports no JAX."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.errors import InputError
from jaxlm.models.execution_config import Dtype

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEKKEN, TIKTOKEN, SENTENCEPIECE, VOCABULARY, MERGES = (
    *("tekken.json", ("tiktoken.model", "*.tiktoken"), "tokenizer.model", "vocab.json", "merges.txt"),
)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
DTYPES = "dtypes.json"  # of the tensors that an imported run was read from: ours
# Files that are carried through an import and an export as they are. A * stands for any letters.
CARRIED = (
    *(CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS),
    *(TEKKEN, *TIKTOKEN, SENTENCEPIECE, VOCABULARY, MERGES, "chat_template.jinja", "chat_template.json"),
)


def is_published(path: Path) -> bool:
    """Return whether a folder is a Hugging Face directory."""
    return (path / CONFIG).is_file()


def carried(folder: Path) -> list[Path]:
    """Return the files of a folder that an import and an export carry."""
    return [file for pattern in CARRIED for file in sorted(folder.glob(pattern)) if file.is_file()]


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def is_adapter(path: Path) -> bool:
    """Return whether a folder is a PEFT directory."""
    return (path / ADAPTER_CONFIG).is_file()


def read_json(file: Path) -> dict[str, Any]:
    """Return the table in a JSON file. Raises InputError if the file has none."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no {file}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON ({error})") from None
    if not isinstance(table, dict):
        raise InputError(f"{file} holds no table")
    return table


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a table in the format of transformers: keys sorted, indented by two blanks."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def computing_dtype(dtypes: Mapping[str, str]) -> Dtype:
    """Return the dtype that is no coarser than most tensors of a model, whose dtype is under ""."""
    return "bfloat16" if dtypes[""] == "BF16" else "float32"


def config_dtype(config: Mapping[str, Any]) -> Dtype | None:
    """Return a dtype no coarser than the one that config.json gives the weights; None if config.json gives none. As in
    transformers, `dtype` goes before `torch_dtype`."""
    tables = (text_of(config), config)
    dtype = next((table[key] for table in tables for key in ("dtype", "torch_dtype") if table.get(key)), None)
    return None if not isinstance(dtype, str) else "bfloat16" if dtype == "bfloat16" else "float32"


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration, or its text part if the configuration has further parts, such as one for pictures."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def shards(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, by name, from the index of a folder. Raises InputError for a file that is no
    index, and for an index that names a file outside of the folder."""
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise InputError(f"{folder / INDEX} has no table weight_map of files")
    for name in where.values():
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise InputError(f"{folder / INDEX} names {name!r}, which is no file in its folder")
    return where
