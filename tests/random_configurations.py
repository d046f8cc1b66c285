"""Random configurations of models and steps, drawn over every option that counting depends on."""

import random
from dataclasses import dataclass, replace
from typing import Any, get_args

import model_fixtures
from workload_fixtures import workload

from jaxlm.costs.workload import Workload
from jaxlm.models.config import ModelConfig
from jaxlm.models.grouped_query_config import QKNorm
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.rules import Kind

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu_squared")
QK_NORMS = ("none", "none", "none", *get_args(QKNorm))
PATTERNS = ("layers/*", "*feed_forward/*", "*attention/*", "*down", "embedding", "*norm*", "*embedding", "*query*")


@dataclass(frozen=True)
class Scale:
    """Sizes from which configurations are drawn."""

    heads: tuple[int, ...] = (2, 4, 8)
    head_dims: tuple[int, ...] = (8, 16, 24)
    widths: tuple[int, ...] = (32, 48)
    hidden: tuple[int, ...] = (48, 64)
    layers: tuple[int, ...] = (1, 2, 3, 5, 7)
    vocabulary: tuple[int, ...] = (64, 97)
    sequences: tuple[int, ...] = (16, 32)
    windows: tuple[int, ...] = (4, 5, 12)
    batch: int = 8


SMALL = Scale()
LARGE = Scale(
    heads=(8, 16),
    head_dims=(64, 128),
    widths=(1024, 2048),
    hidden=(4096, 5632),
    layers=(4, 6, 8),
    vocabulary=(32_000, 128_256),
    sequences=(1024, 2048),
    windows=(256, 512),
    batch=16,
)


def model(draw: random.Random, scale: Scale) -> ModelConfig:
    """Return a random model."""
    learned = draw.random() < 0.25
    keys = {
        "vocab_size": draw.choice(scale.vocabulary),
        "context_length": max(scale.sequences),
        "num_layers": draw.choice(scale.layers),
        "d_model": draw.choice(scale.widths),
        "norm": _norm(draw),
        "position": {"kind": "learned"} if learned else _position(draw),
        "attention": _attention(draw, scale),
        "feed_forward": _feed_forward(draw, scale),
        **draw.choice(model_fixtures.BLOCKS),
        "tied_embeddings": draw.random() < 0.5,
        "embedding_scale": draw.choice([1.0, 1.0, "sqrt_d_model", 12.0]),
        "embedding_norm": draw.random() < 0.2,
        "residual_scale": draw.choice([1.0, 1.0, 0.22]),
        "logit_scale": draw.choice([1.0, 1.0, 0.0625]),
        "logit_soft_cap": draw.choice([None, None, 30.0]),
    }
    return ModelConfig(**keys, pattern=_pattern(draw, scale, keys["num_layers"], learned))


def _norm(draw: random.Random) -> dict[str, Any]:
    rms = [{}, {"plus_one": True}, {"scale": False}]
    layer = [{}, {"bias": False}, {"scale": False}, {"scale": False, "bias": False}]
    return draw.choice([{"kind": "rms", **draw.choice(rms)}, {"kind": "layer", **draw.choice(layer)}])


def _position(draw: random.Random) -> dict[str, Any]:
    original = {"factor": 8.0, "original_context_length": 16}
    kinds = [{"kind": kind, **original} for kind in ("llama3", "dynamic", "yarn")]
    scaling = draw.choice([None, {"kind": "linear", "factor": 2.0}, *kinds])
    partly = {"fraction": draw.choice([1.0, 1.0, 0.5, 0.75]), "reversed": draw.random() < 0.2}
    return draw.choice(
        [{"kind": "rope", "theta": 1e4, "scaling": scaling, **partly}, {"kind": "rope"}, {"kind": "none"}]
    )


def _attention(draw: random.Random, scale: Scale) -> dict[str, Any]:
    heads = draw.choice(scale.heads)
    keys = {
        "kind": "gqa",
        "num_heads": heads,
        "num_kv_heads": draw.choice([n for n in (1, 2, 4, 8, 16) if heads % n == 0]),
        "head_dim": draw.choice(scale.head_dims),
        "qk_norm": draw.choice(QK_NORMS),
        "qkv_bias": draw.random() < 0.4,
        "output_bias": draw.random() < 0.3,
        "scale": draw.choice([None, 0.1]),
        "soft_cap": draw.choice([None, None, 50.0]),
        "window": draw.choice([None, None, *scale.windows]),
    }
    return keys | {"sinks": keys["scale"] is not None and not keys["output_bias"]}  # no draw, which would change others


def _feed_forward(draw: random.Random, scale: Scale) -> dict[str, Any]:
    return {
        "kind": "dense",
        "d_ff": draw.choice(scale.hidden),
        "activation": draw.choice(ACTIVATIONS),
        "gated": draw.random() < 0.6,
        "bias": draw.random() < 0.3,
    }


def _pattern(draw: random.Random, scale: Scale, layers: int, learned: bool) -> list[dict[str, Any]]:
    """Return up to three entries that change some keys of a layer each; none for half of the models."""
    if layers < 3 or draw.random() < 0.5:
        return []
    entries = []
    for name in ("first", "second", "third")[: draw.choice([2, 2, 3])]:
        patch: dict[str, Any] = {}
        if draw.random() < 0.6:
            patch["attention"] = {"window": draw.choice(scale.windows)}
        if draw.random() < 0.3:
            patch.setdefault("attention", {})["qk_norm"] = draw.choice(QK_NORMS)
        if draw.random() < 0.3:
            patch["feed_forward"] = {"d_ff": draw.choice(scale.hidden), "gated": draw.random() < 0.5}
        if draw.random() < 0.3 and not learned:
            yarn = {"kind": "yarn", "factor": 4.0, "original_context_length": 16}
            patch["position"] = draw.choice(
                [
                    {"kind": "rope"},
                    {"kind": "none"},
                    {"kind": "rope", "scaling": yarn},
                    {"kind": "rope", "fraction": 0.5},
                ]
            )
        entries.append({"name": name, **patch})
    if draw.random() < 0.3:
        entries[-1]["layers"] = "rest"
    elif layers >= 5 and draw.random() < 0.5:
        entries[0]["layers"] = 2
    return entries


def step(draw: random.Random, scale: Scale = SMALL, kind: Kind | None = None, layout: Layout = Layout()) -> Workload:
    """Return a random step of a random model."""
    drawn = model(draw, scale)
    names = [name for name in drawn.activations if draw.random() < 0.5]
    has_norms = drawn.norm.scale or getattr(drawn.norm, "bias", False)
    patterns = [pattern for pattern in PATTERNS if has_norms or pattern != "*norm*"]
    changes = {
        "remat": draw.choice(["none", "full", tuple(names) or "full"]),
        "microbatches": draw.choice([1, 1, 2]),
        "kernels": draw.choice(["auto", "xla"]),
        "dropout": draw.choice([False, False, True]),
        "optimizer": draw.choice(model_fixtures.OPTIMIZERS),
        "frozen": draw.choice([[], [], [draw.choice(patterns)]]),
        "average": draw.choice([False, True]),
        "platform": draw.choice(["gpu", "tpu"]),
        "layout": layout,
    }
    kind = kind or draw.choice(["train", "train", "train", "prefill", "decode"])
    if kind != "train":
        changes |= {"microbatches": 1, "dropout": False, "average": False}
    work = workload(kind, drawn, scale.batch, draw.choice(scale.sequences), **changes)
    if kind == "train" or scale is LARGE:
        return work
    longer = replace(work, batch=draw.choice([1, 3, scale.batch]), sequence=draw.choice([16, 32, 90]))
    context = drawn.model_copy(update={"context_length": 128})
    return replace(longer, model=context, page=32, chunk_tokens=draw.choice([32, 64, 512]))
