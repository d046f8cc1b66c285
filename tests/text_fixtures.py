"""Files of every format that hold given documents."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard


def lines(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, field: text}).encode() + b"\n" for i, text in enumerate(texts))


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    content = lines(texts, field)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_parquet(path: Path, texts: list[str], field: str = "text", rows: int = 7) -> Path:
    table = pyarrow.table({"id": range(len(texts)), field: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def write(path: Path, texts: list[str], field: str = "text") -> Path:
    return (write_parquet if path.suffix == ".parquet" else write_jsonl)(path, texts, field)


RECORDS = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet")
