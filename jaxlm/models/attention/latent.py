"""Multi-head latent attention."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models import config
from jaxlm.models.cache import LayerCache, Slot
from jaxlm.models.doors import attention, by_head, gather, linear, named_heads, rope
from jaxlm.models.logical_axes import HEADS, LATENT, SHARED_KEY
from jaxlm.models.norms import norm
from jaxlm.models.parameters import Module, normal, param
from jaxlm.models.rows import Auxiliary, RowContext

_EPSILON = 1e-6  # of the norms of latents, whatever the model's


class LatentAttention(Module):
    """Attention whose keys and values are made of a latent of each token (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A head's queries and keys have R channels that are rotated, then H that are not.
    """

    def __init__(self, model: config.ModelConfig, rngs: nnx.Rngs):
        self.settings = settings = model.attention
        D, N, C, Q = model.d_model, settings.num_heads, settings.latent_rank, settings.query_rank
        H, R, V = settings.nope_dim, settings.rope_dim, settings.value_dim
        std = model.initializer_std
        if Q is None:
            self.query_latent = self.query_norm = self.query_from_latent = None
            self.query = param(rngs, (D, N, R + H), "embed -> heads head_dim", normal(std))
        else:
            self.query_latent = param(rngs, (D, Q), "embed -> latent", normal(std))
            self.query_norm = norm(model, rngs, (Q,), "latent", epsilon=_EPSILON)
            self.query_from_latent = param(rngs, (Q, N, R + H), "latent -> heads head_dim", normal(std))
            self.query = None
        self.latent = param(rngs, (D, C), "embed -> latent", normal(std))
        self.latent_norm = norm(model, rngs, (C,), "latent", epsilon=_EPSILON)
        self.rope_key = param(rngs, (D, R), "embed -> head_dim", normal(std))
        self.key = param(rngs, (C, N, H), "latent -> heads head_dim", normal(std), kept="heads head_dim latent")
        self.value = param(rngs, (C, N, V), "latent -> heads head_dim", normal(std), kept="heads latent head_dim")
        # Residual outputs shrink with depth (GPT-2, section 2.3), so that their sum does not grow.
        self.output = param(rngs, (N, V, D), "heads head_dim -> embed", normal(std * (2 * model.num_layers) ** -0.5))

    def slots(self) -> dict[str, Slot]:
        """Return its latents, each followed by the shared key: one array, of which values are the first channels."""
        size = self.settings.latent_rank + self.settings.rope_dim
        return {"key": Slot((1, size), (None, "act_latent"), tokens_last=True)}

    def __call__(
        self, x_BTD: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache, Auxiliary]:
        """Return the layer's output for x, [B, T, D] both, and the cache with its latents appended."""
        # Of latents each device has those of its part of the residual, and gathers these: they are narrower.
        latent_BTC, key_BTR = linear(x_BTD, self.latent, self.rope_key, gathers=False)
        latent_BTC = gather(checkpoint_name(self.latent_norm(latent_BTC, LATENT), "latent"))
        key_BTR = gather(checkpoint_name(key_BTR, "latent"))
        query_BTNE = rope(self._query(x_BTD), HEADS, rows.rope)
        key_BT1R = rope(key_BTR[:, :, None], SHARED_KEY, rows.rope)
        form = self._whole if cache.is_own_pass else self._absorbed
        attended_BTNV, cache = form(query_BTNE, latent_BTC, key_BT1R, rows, cache)
        (output_BTD,) = linear(attended_BTNV, self.output)
        return output_BTD, cache, Auxiliary()

    def _query(self, x_BTD: jax.Array) -> jax.Array:
        """Return the queries of all heads before their rotation, from the residual or from their latent."""
        if self.query is not None:
            return linear(x_BTD, self.query)[0]
        assert self.query_latent is not None and self.query_norm is not None and self.query_from_latent is not None
        (latent_BTQ,) = linear(x_BTD, self.query_latent, gathers=False)
        return linear(gather(self.query_norm(latent_BTQ, LATENT)), self.query_from_latent)[0]

    def _whole(
        self, query_BTNE: jax.Array, latent_BTC: jax.Array, key_BT1R: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Return attention over the keys and values of all heads, and the cache with them."""
        nope_BTNH, value_BTNV = linear(latent_BTC, self.key, self.value)
        shared_BTNR = jnp.broadcast_to(key_BT1R, (*nope_BTNH.shape[:3], key_BT1R.shape[3]))
        key_BTNE = jnp.concatenate([shared_BTNR, nope_BTNH], axis=-1)
        query_BTNE, key_BTNE, value_BTNV = named_heads(query_BTNE, key_BTNE, value_BTNV)
        cache = cache.update(rows, key=key_BTNE, value=value_BTNV)
        return attention(query_BTNE, cache.view(), scale=self.settings.scale, reach=rows.reach.keys), cache

    def _absorbed(
        self, query_BTNE: jax.Array, latent_BTC: jax.Array, key_BT1R: jax.Array, rows: RowContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Return attention over latents, and the cache with them: the matrix of keys multiplies queries instead, and
        that of values what attention returns (section 2.1.2)."""
        settings, R = self.settings, key_BT1R.shape[3]
        rotated_BTNR, nope_BTNH = query_BTNE[..., :R], query_BTNE[..., R:]
        query_BTNE = jnp.concatenate([by_head(nope_BTNH, self.key, "head_dim"), rotated_BTNR], axis=-1)
        cache = cache.update(rows, key=jnp.concatenate([latent_BTC[:, :, None], key_BT1R], axis=-1))
        scale = (settings.nope_dim + settings.rope_dim) ** -0.5 if settings.scale is None else settings.scale
        latent_BTNC = attention(query_BTNE, cache.view(), scale=scale, value_dim=settings.latent_rank)
        return by_head(latent_BTNC, self.value, "latent"), cache
