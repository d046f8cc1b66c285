"""Objectives: what a step makes small, as sums over a batch and the number that they are divided by."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxlm.core.registry import Registry
from jaxlm.data.packing import CHOSEN, REJECTED
from jaxlm.models.rows import Auxiliary
from jaxlm.models.transformer import Transformer
from jaxlm.training.config import OBJECTIVES, NextTokenConfig, ObjectiveConfig, TrainingConfig

# tokens, targets, segments, positions: int32 [B, T] each; of preferences also `reference` (`jaxlm.data.packing`).
Batch = dict[str, jax.Array]


PREFERENCE_METRICS = ("accuracy", "margin", "chosen_reward", "rejected_reward")


class Objective(Protocol):
    """The objective of a batch."""

    def count(self, batch: Batch) -> jax.Array:
        """Return the number of what is averaged over, int32."""
        ...

    def sums(self, module: Transformer, hidden_BTD: jax.Array, batch: Batch) -> Auxiliary:
        """Return the terms of the objective, `loss` among them, and statistics, each summed over the batch."""
        ...


class NextToken(NamedTuple):
    """The cross-entropy of the targets that count, with `z_loss` times log² Z."""

    z_loss: float = 0.0

    def count(self, batch: Batch) -> jax.Array:
        """Return the number of targets that count."""
        return jnp.sum(batch["segments"] > 0)

    def sums(self, module: Transformer, hidden_BTD: jax.Array, batch: Batch) -> Auxiliary:
        """Return the sums of `loss`, in nats, and of `z_loss` where there is one."""
        terms = module.cross_entropy(hidden_BTD, batch["targets"], batch["segments"] > 0, self.z_loss)
        return Auxiliary(terms if self.z_loss else {"loss": terms["loss"]})


# Makes an objective of its section and of [training].
MakeObjective = Callable[[Any, TrainingConfig], Objective]

_REGISTRY: Registry[MakeObjective] = Registry(
    OBJECTIVES, ObjectiveConfig, {NextTokenConfig: lambda _, training: NextToken(training.z_loss)}
)
register, unregister = _REGISTRY.register, _REGISTRY.unregister


def objective(settings: ObjectiveConfig, training: TrainingConfig) -> Objective:
    """Return the objective of text that the configuration names."""
    return _REGISTRY.of(settings)(settings, training)


class DirectPreference(NamedTuple):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    A row holds two answers to one prompt. With r = `beta` (ln π(answer) − ln π_ref(answer)), the loss of a pair is
    −ln σ(r_chosen − r_rejected). `reference`, [B, 2] in a batch, is ln π_ref of the chosen and the rejected answer.
    """

    beta: float

    def count(self, batch: Batch) -> jax.Array:
        """Return the number of pairs."""
        return jnp.sum(self._is_pair(batch))

    def sums(self, module: Transformer, hidden_BTD: jax.Array, batch: Batch) -> Auxiliary:
        """Return the sum of `loss` and, over pairs, of `accuracy` (of the chosen answer having the higher r), `margin`
        (r_chosen − r_rejected), `chosen_reward` and `rejected_reward`."""
        rewards_B2 = self.beta * (preference_logprobs(module, hidden_BTD, batch) - batch["reference"])
        margin_B, pair_B = rewards_B2[:, 0] - rewards_B2[:, 1], self._is_pair(batch)

        def total(x_B: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(pair_B, x_B, 0.0))

        each = (margin_B > 0).astype(jnp.float32), margin_B, rewards_B2[:, 0], rewards_B2[:, 1]
        statistics = dict(zip(PREFERENCE_METRICS, map(total, each), strict=True))
        return Auxiliary({"loss": total(-jax.nn.log_sigmoid(margin_B))}, statistics)

    def _is_pair(self, batch: Batch) -> jax.Array:
        return jnp.any(batch["segments"] > 0, axis=1)


def preference_logprobs(module: Transformer, hidden_BTD: jax.Array, batch: Batch) -> jax.Array:
    """Return ln p of the chosen and of the rejected answer of each row, float32 [B, 2]."""
    segments_BT = batch["segments"]
    losses_BT = module.token_losses(hidden_BTD, batch["targets"], segments_BT > 0)
    return -jnp.stack([jnp.sum(losses_BT * (segments_BT == part), axis=1) for part in (CHOSEN, REJECTED)], axis=1)
