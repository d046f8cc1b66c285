"""A small experiment for the tests of configurations, and its error messages."""

from pathlib import Path

import pytest

from jaxlm.config import load
from jaxlm.core.errors import InputError

SMALL = Path("little.toml")


CONTENT = """
[model]
vocab_size = 4096
context_length = 256
num_layers = 4
d_model = 256

[model.norm]
kind = "rms"

[model.position]
kind = "rope"

[model.attention]
num_heads = 8
num_kv_heads = 4

[model.feed_forward]
d_ff = 768
activation = "silu"

[data]
text = "stdlib"

[execution]
dtype = "float32"

[training]
steps = 400
batch = 16
"""


def refusal(*overrides: str, path: Path = SMALL) -> str:
    """Return the one-line error of an invalid configuration."""
    with pytest.raises(InputError) as refused:
        load(path, overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def flat(values: dict, prefix: str = "") -> dict:
    """Return nested tables as dotted keys."""
    pairs = {}
    for key, value in values.items():
        pairs.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return pairs


def changed(*overrides: str) -> dict:
    """Return the keys of the small experiment that overrides change, with their new values."""
    before, after = flat(load(SMALL).model_dump()), flat(load(SMALL, overrides).model_dump())
    return {key: value for key, value in after.items() if key not in before or before[key] != value}
