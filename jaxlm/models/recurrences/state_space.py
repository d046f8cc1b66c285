"""The state space of Mamba-2, token by token and in chunks."""

import jax
import jax.numpy as jnp

from jaxlm.models.doors.scan import ChunkRows, Recurrence, States, TokenArray
from jaxlm.models.recurrences.decay import by_group, decays_in_chunk
from jaxlm.models.recurrences.matrix_state import matrix_recurrence, through_matrix

CHUNK = 64  # tokens


def state_space(heads: int, state_dim: int, head_dim: int, skip: TokenArray) -> Recurrence:
    """Return the recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 6): for each of N heads

        S ← exp(g)·S + k·(δ·v)ᵀ,   y = Sᵀq + skip·v.

    Its inputs are q and k [B, T, K, H], in Mamba C and B, v [B, T, N, V], there x, the logarithm g ≤ 0 of the decay and
    δ, both [B, T, N]. Each q and k is shared by N / K heads that follow one another. Outputs are [B, T, N, V] in the
    dtype of v. Its state [N, H, V] is called `matrix`. All is computed in float32. `skip`: [N].
    """
    return matrix_recurrence(_chunk, CHUNK, heads, state_dim, head_dim, (skip,))


def _chunk(
    states: States,
    rows: ChunkRows,
    q_BCKH: jax.Array,
    k_BCKH: jax.Array,
    v_BCNV: jax.Array,
    g_BCN: jax.Array,
    delta_BCN: jax.Array,
    skip_N: jax.Array,
) -> tuple[States, jax.Array]:
    """Compute a chunk (section 6, by blocks)."""
    K = q_BCKH.shape[2]
    is_token_BC1, float32 = rows.is_token_BC[:, :, None], jnp.float32
    delta_BCN, g_BCN = (jnp.where(is_token_BC1, x, 0.0) for x in (delta_BCN, g_BCN))
    q_BKCH, k_BKCH = (jnp.swapaxes(x.astype(float32), 1, 2) for x in (q_BCKH, k_BCKH))
    written_BKGCV = by_group(v_BCNV * delta_BCN[..., None], K)
    arrays = q_BKCH, k_BKCH, written_BKGCV, jnp.cumsum(by_group(g_BCN, K), axis=3)
    states, y_BCNV = through_matrix(states, rows, _token, _tokens, *arrays)
    return states, (y_BCNV + skip_N.astype(float32)[None, None, :, None] * v_BCNV).astype(v_BCNV.dtype)


def _token(
    state_BKGHV: jax.Array,
    document_B1: jax.Array,
    q_BK1H: jax.Array,
    k_BK1H: jax.Array,
    v_BKG1V: jax.Array,
    g_BKG1: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute one token, in sums of products number by number."""
    of_document_B = (document_B1 == 0)[:, 0, None, None, None, None]
    q_BK1H1, k_BK1H1 = (x[:, :, 0, :, None][:, :, None] for x in (q_BK1H, k_BK1H))
    state_BKGHV = jnp.where(of_document_B, state_BKGHV * jnp.exp(g_BKG1)[..., None], 0.0) + k_BK1H1 * v_BKG1V
    return jnp.sum(state_BKGHV * q_BK1H1, axis=3, keepdims=True), state_BKGHV


def _tokens(
    state_BKGHV: jax.Array,
    document_BC: jax.Array,
    q_BKCH: jax.Array,
    k_BKCH: jax.Array,
    v_BKGCV: jax.Array,
    total_BKGC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute several tokens; `total_BKGC` has the sums of g from the first token on."""
    decay_BKGCC, before_BKGC = decays_in_chunk(document_BC, total_BKGC)
    scores_BKGCC = jnp.einsum("BKiH,BKjH->BKij", q_BKCH, k_BKCH)[:, :, None] * decay_BKGCC
    y_BKGCV = jnp.einsum("BKGij,BKGjV->BKGiV", scores_BKGCC, v_BKGCV)
    y_BKGCV += before_BKGC[..., None] * jnp.einsum("BKCH,BKGHV->BKGCV", q_BKCH, state_BKGHV)
    # What the last token sees of each is what is left of it after the chunk: padding decays nothing.
    left_BKGCV = decay_BKGCC[..., -1, :, None] * v_BKGCV
    after_BKGHV = before_BKGC[..., -1, None, None] * state_BKGHV
    return y_BKGCV, after_BKGHV + jnp.einsum("BKCH,BKGCV->BKGHV", k_BKCH, left_BKGCV)
