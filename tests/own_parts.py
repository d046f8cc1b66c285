"""A plug-in with one part of each kind, which the tests of plug-ins copy to where a user has one."""

from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import optax
import tokenizers

from jaxlm.core.schema import BelowOne, Count, NonNegative, Positive
from jaxlm.costs.hardware import catalog
from jaxlm.data import tokenizer_training
from jaxlm.models import doors, feed_forward, norms
from jaxlm.models.config import LayerConfig, NormConfig
from jaxlm.models.doors import activation, linear
from jaxlm.models.logical_axes import RESIDUAL
from jaxlm.models.parameters import Module, normal, ones, param, zeros
from jaxlm.models.rows import Auxiliary
from jaxlm.training import objectives, optimizer
from jaxlm.training.config import ObjectiveConfig, OptimizerConfig


class SquaredConfig(LayerConfig):
    """Two matrices with a square between."""

    activations: ClassVar = ("inner",)
    logical_axes: ClassVar = {"inner_dim": "feed_forward"}

    kind: Literal["squared"] = "squared"
    inner_dim: Count
    """Channels between the matrices."""


class Squared(Module):
    """relu(x·W_up)²·W_down."""

    def __init__(self, model, rngs):
        D, F, initial = model.d_model, model.feed_forward.inner_dim, normal(model.initializer_std)
        self.up = param(rngs, (D, F), "embed -> feed_forward", initial)
        self.down = param(rngs, (F, D), "feed_forward -> embed", initial)

    def __call__(self, x_BTD, rows):
        (inner_BTF,) = linear(x_BTD, self.up, names=("inner",))
        (output_BTD,) = linear(activation("relu_squared", inner_BTF), self.down)
        return output_BTD, Auxiliary()


class DynamicTanhConfig(NormConfig):
    """Dynamic tanh in place of a norm (Zhu et al. 2025, arXiv:2503.10622)."""

    kind: Literal["dynamic_tanh"] = "dynamic_tanh"
    alpha: Positive = 0.5
    """Multiplies the argument of tanh."""


def dynamic_tanh(x_D, scale_D, bias_D, *, alpha):
    return scale_D * jnp.tanh(alpha * x_D) + bias_D


class DynamicTanh(Module):
    """tanh(α x) · scale + bias."""

    def __init__(self, model, rngs, shape, axes):
        self.alpha, self.dimensions = model.norm.alpha, len(shape)
        self.scale, self.bias = param(rngs, shape, axes, ones), param(rngs, shape, axes, zeros)

    def __call__(self, x, axes=RESIDUAL, residual=None):
        return doors.norm(dynamic_tanh, x, axes, (self.scale, self.bias), residual, self.dimensions, alpha=self.alpha)


class SignumConfig(OptimizerConfig):
    """The sign of the momentum (Bernstein et al. 2018, arXiv:1802.04434)."""

    kind: Literal["signum"] = "signum"
    learning_rate: Positive = 1e-3
    momentum: BelowOne = 0.9
    """Decay of the momentum."""


def signum(settings, dimensions):
    return optax.chain(optax.trace(settings.momentum), optax.scale_by_sign())


class FocalConfig(ObjectiveConfig):
    """The focal loss (Lin et al. 2017, arXiv:1708.02002, equation 4)."""

    kind: Literal["focal"] = "focal"
    gamma: NonNegative = 2.0
    """The power of the error that weighs a target."""


class Focal(NamedTuple):
    """(1 − p)^γ · −ln p."""

    gamma: float

    def count(self, batch):
        return jnp.sum(batch["segments"] > 0)

    def sums(self, module, hidden_BTD, batch):
        losses_BT = module.token_losses(hidden_BTD, batch["targets"], batch["segments"] > 0)
        weights_BT = (1.0 - jnp.exp(-losses_BT)) ** self.gamma
        return Auxiliary({"loss": jnp.sum(weights_BT * losses_BT)}, {"cross_entropy": jnp.sum(losses_BT)})


def train_words(texts, vocabulary):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        texts,
        tokenizers.trainers.WordLevelTrainer(
            vocab_size=vocabulary, special_tokens=["<unk>", "<|endoftext|>"], show_progress=False
        ),
    )
    return tokenizer


CHIP = {
    "name": "A processor of one's own",
    "vendor": "own",
    "kind": "asic",
    "peak_flops": {"bfloat16": 100e12, "float32": 50e12},
    "memory_bytes": 32 * 2**30,
    "memory_bytes_per_s": 1e12,
    "watts": 100,
    "sources": {"its data sheet": ["peak_flops", "memory_bytes", "memory_bytes_per_s", "watts"]},
}

feed_forward.register(SquaredConfig, Squared)
norms.register(DynamicTanhConfig, DynamicTanh)
optimizer.register(SignumConfig, signum)
objectives.register(FocalConfig, lambda settings, training: Focal(settings.gamma))
tokenizer_training.register("words", train_words)
catalog.register("own-npu", CHIP)


def unregister():
    """Take all parts out again, for the tests after these."""
    feed_forward.unregister(SquaredConfig)
    norms.unregister(DynamicTanhConfig)
    optimizer.unregister(SignumConfig)
    objectives.unregister(FocalConfig)
    tokenizer_training.unregister("words")
    catalog.unregister("own-npu")
