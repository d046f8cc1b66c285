"""A mixture of experts."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import (
    Choice,
    Routes,
    activation,
    from_experts,
    gated,
    gather,
    linear,
    passes_needed,
    route,
    send_to_experts,
    sends_rows,
    sort_by_expert,
    to_experts,
)
from jaxlm.models.doors.expert_matrices import PlacedArray
from jaxlm.models.doors.expert_rows import ExpertRows
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.feed_forward.passes import summed_passes
from jaxlm.models.feed_forward_config import DenseFeedForwardConfig, MixtureFeedForwardConfig
from jaxlm.models.logical_axes import EXPERT_TOKENS, GATHERED, SENT_HIDDEN, Axes
from jaxlm.models.parameters import Module, normal, param, state, zeros
from jaxlm.models.recording import is_recording
from jaxlm.models.rows import Auxiliary, RowContext
from jaxlm.parallel.collectives import summed_over_parts


class MixtureFeedForward(Module):
    """The weighted sum of the experts that a router chooses for each token (arXiv:1701.06538, equation 1), and shared
    experts (arXiv:2401.06066, equation 9). No token is dropped, and no product is computed for what no token chose."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.settings = settings = model.feed_forward
        D, E, F, std = model.d_model, settings.num_experts, settings.d_ff, model.initializer_std
        L, axis = (settings.latent_dim, "latent") if settings.latent_dim else (D, "embed")
        last = std * (2 * model.num_layers) ** -0.5
        self.choice = _choice(settings)
        self.router = param(rngs, (D, E), "embed -> routes", normal(std))
        self.router_bias = param(rngs, (E,), "routes", zeros) if settings.router.bias else None
        biased = settings.router.selection_bias
        self.selection_bias = state((E,), "routes", settings.bias_rate) if biased else None
        self.to_latent = param(rngs, (D, L), "embed -> latent", normal(std)) if axis == "latent" else None
        self.gate = param(rngs, (E, F, L), f"experts feed_forward <- {axis}", normal(std)) if settings.gated else None
        self.up = param(rngs, (E, F, L), f"experts feed_forward <- {axis}", normal(std))
        self.down = param(rngs, (E, L, F), f"experts {axis} <- feed_forward", normal(last))
        biased = settings.bias
        self.gate_bias = param(rngs, (E, F), "experts feed_forward", zeros) if biased and settings.gated else None
        self.up_bias = param(rngs, (E, F), "experts feed_forward", zeros) if biased else None
        self.down_bias = (
            param(rngs, (E, L), f"experts {'latent' if settings.latent_dim else 'channels'}", zeros) if biased else None
        )
        self.from_latent = param(rngs, (L, D), "latent -> embed", normal(last)) if axis == "latent" else None
        self.shared = DenseFeedForward(_of_shared(model), rngs) if settings.shared else None
        has_gate = settings.shared is not None and settings.shared.gate == "sigmoid"
        self.shared_gate = param(rngs, (D, 1), "embed -> shared_gate", normal(std)) if has_gate else None

    def __call__(self, x_BTD: jax.Array, rows: RowContext) -> tuple[jax.Array, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both, and the terms and statistics of `balance`."""
        routes = route(x_BTD, self.router, self.choice, self.router_bias, self.selection_bias)
        sends = sends_rows(len(x_BTD), self.settings.num_experts)
        tokens = GATHERED if sends else EXPERT_TOKENS
        if self.to_latent is None:
            inputs_BTL = gather(x_BTD, after=tokens)
        else:
            (inputs_BTL,) = linear(x_BTD, self.to_latent)
            if not sends:
                inputs_BTL = gather(inputs_BTL, (*GATHERED[:2], "act_latent"), (*tokens[:2], "act_latent"))
        of_experts = self._of_sent_rows if sends else self._of_gathered_tokens
        output_BTD, statistics = of_experts(inputs_BTL, routes, rows.is_token_BT)
        if self.from_latent is not None:
            (output_BTD,) = linear(output_BTD, self.from_latent)
        if self.shared is not None:
            shared_BTD, _ = self.shared(x_BTD, rows)
            output_BTD += self._gated_shared(x_BTD, shared_BTD)
        return output_BTD, Auxiliary(statistics=statistics) | balance(self.settings, routes, rows.is_token_BT)

    def _of_gathered_tokens(
        self, inputs_BTL: jax.Array, routes: Routes, is_token_BT: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the weighted sums of the experts of each token, of tokens of all devices that share out the experts,
        and no statistics."""
        chosen = sort_by_expert(routes.index_BTk, is_token_BT, self.settings.num_experts)
        hidden_PXRF = self._hidden(self._experts, inputs_BTL, chosen)
        return from_experts(hidden_PXRF, chosen, routes.weights_BTk, self.down, self.down_bias), {}

    def _of_sent_rows(
        self, inputs_BTL: jax.Array, routes: Routes, is_token_BT: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the weighted sums of the experts of each token, whose rows are sent to the devices of their experts,
        and `expert_overflow`, 1 where more than one pass is needed, otherwise 0."""
        graph, state = nnx.split(self._experts)
        experts = self.settings.num_experts

        def one(number: jax.Array, operands: tuple) -> jax.Array:
            state, inputs_BTL, index_BTk, weights_BTk, is_token_BT = operands
            matrices = nnx.merge(graph, state)
            sent = send_to_experts(inputs_BTL, index_BTk, weights_BTk, is_token_BT, matrices["up"], number)
            chosen = sort_by_expert(sent.index_BR1, None, experts, SENT_HIDDEN)
            hidden_PXRF = self._hidden(matrices, sent.x_BRD, chosen, sent.of_parts)
            return from_experts(hidden_PXRF, chosen, sent.weights_BR1, matrices["down"], matrices["down_bias"], sent)

        operands = state, inputs_BTL, routes.index_BTk, routes.weights_BTk, is_token_BT
        if is_recording():  # of one pass
            return one(jnp.int32(0), operands), {}
        passes = passes_needed(routes.index_BTk, is_token_BT, experts)
        return summed_passes(one, passes, operands), {"expert_overflow": (passes > 1).astype(jnp.float32)}

    @property
    def _experts(self) -> dict[str, Any]:
        """The matrices and biases of the experts."""
        names = "gate", "up", "down", "gate_bias", "up_bias", "down_bias"
        return {name: getattr(self, name) for name in names}

    def _hidden(
        self,
        experts: dict[str, Any],
        inputs_BTL: jax.Array,
        chosen: ExpertRows,
        of_parts: PlacedArray | None = None,
    ) -> jax.Array:
        """Return the hidden numbers of the rows of experts, [P, X, R, F]."""
        if experts["gate"] is None:
            biases, names = (experts["up_bias"],), ("up",)
            (up_PXRF,) = to_experts(inputs_BTL, chosen, experts["up"], biases=biases, names=names, of_parts=of_parts)
            return activation(self.settings.activation, up_PXRF, axes=chosen.hidden)
        biases, names = (experts["up_bias"], experts["gate_bias"]), ("up", "gate")
        matrices = experts["up"], experts["gate"]
        up_PXRF, gate_PXRF = to_experts(inputs_BTL, chosen, *matrices, biases=biases, names=names, of_parts=of_parts)
        return self._gated(gate_PXRF, up_PXRF, chosen.hidden)

    def _gated(self, gate_PXRF: jax.Array, up_PXRF: jax.Array, axes: Axes) -> jax.Array:
        """Return activation(gate) ⊙ up, limited, sloped and offset as the settings say."""
        settings = self.settings
        if settings.clamp is not None:
            gate_PXRF = jnp.minimum(gate_PXRF, settings.clamp)
            up_PXRF = jnp.clip(up_PXRF, -settings.clamp, settings.clamp)
        if settings.up_offset:
            up_PXRF = up_PXRF + settings.up_offset
        if settings.gate_slope is not None:
            return gate_PXRF * jax.nn.sigmoid(settings.gate_slope * gate_PXRF) * up_PXRF
        return gated(settings.activation, gate_PXRF, up_PXRF, axes)

    def _gated_shared(self, x_BTD: jax.Array, shared_BTD: jax.Array) -> jax.Array:
        """Return the output of the shared experts times their gate, if they have one."""
        if self.shared_gate is None:
            return shared_BTD
        (gate_BT1,) = linear(x_BTD, self.shared_gate)
        return shared_BTD * jax.nn.sigmoid(gate_BT1)


def balance(settings: MixtureFeedForwardConfig, routes: Routes, is_token_BT: jax.Array) -> Auxiliary:
    """Return the terms of the objective that a mixture adds, `balance_loss` and `router_z_loss` where their factors are
    above 0, the statistics `expert_load`, the tokens of the busiest expert over the mean, and `router_entropy`, in
    nats, and the tokens of each expert, which move a selection bias. Padding counts in none."""
    E, terms = settings.num_experts, settings.balance
    is_token_BT1 = is_token_BT[..., None]
    is_chosen_BTE = jnp.any(routes.index_BTk[..., None] == jnp.arange(E)[None, None, None], axis=2) & is_token_BT1
    count_BE = jnp.sum(is_chosen_BTE, axis=1).astype(jnp.float32)
    own_count_E = jnp.sum(count_BE, axis=0)
    count_E = summed_over_parts(own_count_E)
    tokens = jnp.maximum(jnp.sum(is_token_BT), 1).astype(jnp.float32)
    probability_BTE = jnp.where(is_token_BT1, routes.probability_BTE, 0.0)

    def mean(each_BT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_token_BT, each_BT, 0.0)) / tokens

    losses = {}
    if terms.auxiliary_loss:
        counts_BE = count_BE if terms.over == "sequence" else count_E[None]
        share_BE = E * counts_BE / jnp.maximum(jnp.sum(counts_BE, axis=-1, keepdims=True), 1.0)
        losses["balance_loss"] = terms.auxiliary_loss * mean(jnp.sum(share_BE[:, None] * probability_BTE, axis=-1))
    if terms.z_loss:
        losses["router_z_loss"] = terms.z_loss * mean(jnp.square(routes.log_z_BT))
    entropy_BT = -jnp.sum(jax.scipy.special.xlogy(probability_BTE, probability_BTE), axis=-1)
    load = jnp.max(count_E) * E / jnp.maximum(jnp.sum(count_E), 1.0)
    counts = {"selection_bias": own_count_E} if settings.router.selection_bias else {}
    return Auxiliary(losses, {"expert_load": load, "router_entropy": mean(entropy_BT)}, counts)


def _choice(settings: MixtureFeedForwardConfig) -> Choice:
    """Return the rule by which tokens choose experts."""
    router, groups = settings.router, settings.router.groups
    limits = (1, 1, "max") if groups is None else (groups.count, groups.kept, groups.score)
    return Choice(settings.experts_per_token, router.scores, router.normalise, router.epsilon, router.scale, *limits)


def _of_shared(model: ModelConfig) -> ModelConfig:
    """Return the model with the shared experts of its mixture as the feed-forward layer."""
    settings = model.feed_forward
    shared = DenseFeedForwardConfig(d_ff=settings.shared.d_ff, activation=settings.activation, gated=settings.gated)
    return model.model_copy(update={"feed_forward": shared})
