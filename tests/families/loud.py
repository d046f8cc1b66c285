"""Weights of the family fixtures, drawn from each tensor's published name and shape.

The draws come from SHAKE-256 and exact arithmetic, not from a library's generator: they have the same bits on every
machine and under every version, so fixtures carry no weights. Nothing but NumPy is needed.

Loud weights show what default initialisation hides: dropped norm scales, biases, caps and rope settings. Quiet weights
look like default initialisation: they show the epsilons, beside which loud activations are too large.
"""

import hashlib
import json
import math
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
VARIANTS = ("loud", "quiet")
STATE = ("e_score_correction_bias", "expert_bias")  # which no gradient moves
# Norms that multiply by their scale whatever the others of the model do.
PLAIN_NORMS = ("linear_attn.norm.weight",)
EMBEDDINGS = ("embed_tokens", "embed_in", "embeddings", "wte", "wpe")


def normals(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return float64 draws of mean 0 and variance 1: each is the sum of twelve uniform 16-bit numbers, centred."""
    count = math.prod(shape)
    words = np.frombuffer(hashlib.shake_256(key.encode()).digest(24 * count), "<u2").reshape(count, 12)
    return ((words.sum(1, dtype=np.int64) - 6 * 65535) / 65536).reshape(shape)


def tokens(key: str, count: int, vocab_size: int) -> list[int]:
    """Return token ids drawn from 3 up: the lower ones are special."""
    words = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * count), "<u4")
    return [3 + int(word) % (vocab_size - 3) for word in words]


def tensor(
    name: str, shape: tuple[int, ...], variant: str, norm_center: float = 1.0, embedding_std: float = 1.0
) -> np.ndarray:
    """Return one float32 tensor of a checkpoint.

    Loud: matrices N(0, 1.5² / fan-in), norm scales N(norm_center, 0.3²), biases and sinks N(0, 0.5²), embeddings
    N(0, embedding_std²), selection biases N(-0.5, 0.5²), so that scores lie on both sides of 0, logarithms of decay
    rates N(-2, 1), so that states are read over many tokens. Quiet: matrices N(0, 0.02²), norm scales norm_center,
    biases 0, logarithms of rates -2, embeddings N(0, (0.02 embedding_std)²).

    Args:
        name: The name in the published file. A Linear is stored [out, in], GPT-2's Conv1D [in, out], and GPT-OSS's
            experts [experts, in, out]; weights of convolutions [channels, 1, taps].
        shape: The shape in the file.
        variant: "loud" or "quiet".
        norm_center: 0 for the norms that multiply by one plus their scale, otherwise 1.
        embedding_std: The inverse of the factor by which the family multiplies its embeddings.
    """
    loud = {"loud": True, "quiet": False}[variant]
    draws = normals(f"{name} {list(shape)}", shape)
    if is_state(name):
        values = loud * (0.5 * draws - 0.5)
    elif name.endswith("A_log"):
        values = loud * draws - 2.0
    elif name.endswith(("bias", "sinks")):
        values = 0.5 * loud * draws
    elif "norm" in name or ".ln_" in name:
        values = (1.0 if name.endswith(PLAIN_NORMS) else norm_center) + 0.3 * loud * draws
    elif any(part in name.split(".") for part in EMBEDDINGS):
        values = (1.0 if loud else 0.02) * embedding_std * draws
    else:
        is_transposed = name.startswith("transformer.h.") or (len(shape) == 3 and shape[1] > 1)
        fan_in = shape[-2] if is_transposed else shape[-1]
        values = (1.5 / math.sqrt(fan_in) if loud else 0.02) * draws
    return values.astype(np.float32)


def is_state(name: str) -> bool:
    """Return whether a tensor is no parameter but state, a buffer in transformers."""
    return name.endswith(STATE)


def names() -> list[str]:
    """Return the names of the committed fixtures."""
    return sorted(file.stem for file in FIXTURES.glob("*.json"))


def read(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Return a fixture's facts and its arrays."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8")), dict(arrays)


def weights(fixture: dict, variant: str) -> dict[str, np.ndarray]:
    """Return all tensors of a fixture's checkpoint by name."""
    return {
        name: tensor(name, tuple(shape), variant, **fixture["weights"]) for name, shape in fixture["tensors"].items()
    }
