"""Token stores of given documents."""

from collections.abc import Iterable
from pathlib import Path

from jaxlm.data.store import DocumentEncoder, StoreWriter, TokenStore
from jaxlm.data.tokenizers import Tokenizer


def write_store(directory: Path, texts: Iterable[str], tokenizer: Tokenizer) -> TokenStore:
    """Tokenize documents into a new folder."""
    with StoreWriter(directory, DocumentEncoder(tokenizer)) as writer:
        for text in texts:
            writer.add(text)
    return TokenStore(directory)
