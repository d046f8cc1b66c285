"""The gated delta rule, token by token and in chunks."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxlm.models.doors.scan import ChunkRows, Recurrence, States
from jaxlm.models.recurrences.decay import by_group, decays_in_chunk
from jaxlm.models.recurrences.matrix_state import matrix_recurrence, through_matrix

CHUNK = 64  # tokens
_BLOCK = 4  # rows of a block whose inverse is a short series
_EPSILON = 1e-6  # added to the sum of squares of a query or key


def gated_delta_rule(heads: int, key_dim: int, value_dim: int) -> Recurrence:
    """Return the gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10): for each of N heads

        S ← exp(g)·S,   S ← S + k·(β·(v − Sᵀk))ᵀ,   y = Sᵀq.

    Its inputs are q and k [B, T, K, H], v [B, T, N, V], the logarithm g ≤ 0 of the decay and β, both [B, T, N]. Queries
    and keys are divided by their lengths, queries by √H besides; each is shared by N / K heads that follow one another.
    Its outputs are [B, T, N, V] in v's dtype. Its state [N, H, V] is called `matrix`. All is computed in float32.
    """
    return matrix_recurrence(_chunk, CHUNK, heads, key_dim, value_dim)


def _chunk(
    states: States,
    rows: ChunkRows,
    q_BCKH: jax.Array,
    k_BCKH: jax.Array,
    v_BCNV: jax.Array,
    g_BCN: jax.Array,
    beta_BCN: jax.Array,
) -> tuple[States, jax.Array]:
    """Compute a chunk: the tokens' changes d = β·(v − Sᵀk) of the state solve a triangular system (section 3.3)."""
    K, H = q_BCKH.shape[2:]
    is_token_BC1 = rows.is_token_BC[:, :, None]
    q_BKCH = jnp.swapaxes(_unit(q_BCKH) * H**-0.5, 1, 2)
    k_BKCH = jnp.swapaxes(_unit(k_BCKH) * is_token_BC1[..., None], 1, 2)
    beta_BKGC, g_BKGC = (by_group(jnp.where(is_token_BC1, x, 0.0), K) for x in (beta_BCN, g_BCN))
    arrays = q_BKCH, k_BKCH, by_group(v_BCNV, K), jnp.cumsum(g_BKGC, axis=3), beta_BKGC
    states, y_BCNV = through_matrix(states, rows, _token, _tokens, *arrays)
    return states, y_BCNV.astype(v_BCNV.dtype)


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON)


def _token(
    state_BKGHV: jax.Array,
    document_B1: jax.Array,
    q_BK1H: jax.Array,
    k_BK1H: jax.Array,
    v_BKG1V: jax.Array,
    g_BKG1: jax.Array,
    beta_BKG1: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute one token, in sums of products number by number: the state is read twice and multiplied in float32."""
    of_document_B = (document_B1 == 0)[:, 0, None, None, None, None]
    state_BKGHV = jnp.where(of_document_B, state_BKGHV * jnp.exp(g_BKG1)[..., None], 0.0)
    q_BK1H1, k_BK1H1 = (x[:, :, 0, :, None][:, :, None] for x in (q_BK1H, k_BK1H))
    found_BKG1V = jnp.sum(state_BKGHV * k_BK1H1, axis=3, keepdims=True)
    change_BKG1V = beta_BKG1[..., None] * (v_BKG1V - found_BKG1V)
    state_BKGHV += k_BK1H1 * change_BKG1V
    return jnp.sum(state_BKGHV * q_BK1H1, axis=3, keepdims=True), state_BKGHV


def _tokens(
    state_BKGHV: jax.Array,
    document_BC: jax.Array,
    q_BKCH: jax.Array,
    k_BKCH: jax.Array,
    v_BKGCV: jax.Array,
    total_BKGC: jax.Array,
    beta_BKGC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute several tokens; `total_BKGC` has the sums of g from the first token on."""
    C = document_BC.shape[1]
    decay_BKGCC, before_BKGC = decays_in_chunk(document_BC, total_BKGC)

    # Products of keys and queries with keys, and with the state before the chunk.
    kq_BKRH = jnp.concatenate([k_BKCH, q_BKCH], axis=2)
    scores_BKRC = jnp.einsum("BKRH,BKCH->BKRC", kq_BKRH, k_BKCH)
    read_BKGRV = jnp.einsum("BKRH,BKGHV->BKGRV", kq_BKRH, state_BKGHV)
    of_keys_BKGCC = scores_BKRC[:, :, None, :C] * decay_BKGCC
    of_queries_BKGCC = scores_BKRC[:, :, None, C:] * decay_BKGCC

    system_BKGCC = jnp.tril(beta_BKGC[..., None] * of_keys_BKGCC, -1)
    right_BKGCV = beta_BKGC[..., None] * (v_BKGCV - before_BKGC[..., None] * read_BKGRV[:, :, :, :C])
    change_BKGCV = solved(system_BKGCC, right_BKGCV)
    y_BKGCV = before_BKGC[..., None] * read_BKGRV[:, :, :, C:]
    y_BKGCV += jnp.einsum("BKGij,BKGjV->BKGiV", of_queries_BKGCC, change_BKGCV)
    # What the last token sees of each is what is left of it after the chunk: padding decays nothing.
    left_BKGCV = decay_BKGCC[..., -1, :, None] * change_BKGCV
    after_BKGHV = before_BKGC[..., -1, None, None] * state_BKGHV
    return y_BKGCV, after_BKGHV + jnp.einsum("BKCH,BKGCV->BKGHV", k_BKCH, left_BKGCV)


@jax.custom_vjp
def solved(lower: jax.Array, right: jax.Array) -> jax.Array:
    """Return (I + L)⁻¹ · R of strictly lower triangular L [..., C, C] and R [..., C, V], float32."""
    return _product(_inverse(lower), right)


def _solved(lower: jax.Array, right: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _inverse(lower)
    x = _product(inverse, right)
    return x, (inverse, x)


def _solved_backward(kept: tuple[jax.Array, jax.Array], dx: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, x = kept
    dright = _product(jnp.swapaxes(inverse, -1, -2), dx)
    return -jnp.tril(_product(dright, jnp.swapaxes(x, -1, -2)), -1), dright


solved.defvjp(_solved, _solved_backward)

_product = partial(jnp.matmul, precision="highest")


def _inverse(lower: jax.Array) -> jax.Array:
    """Return (I + L)⁻¹, in blocks of twice as many rows from one product to the next: the series (I − L)(I + L²) for
    blocks of four, then [[P, 0], [−R·Q·P, R]] of the inverses P and R of two blocks and Q below the first."""
    C, size = lower.shape[-1], _BLOCK
    rows = max(_BLOCK, 1 << (C - 1).bit_length())
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, rows - C)] * 2)
    diagonal = _blocks(lower, size, 0)
    eye = jnp.broadcast_to(jnp.eye(_BLOCK), diagonal.shape)
    inverse = _product(eye - diagonal, eye + _product(diagonal, diagonal))
    while size < rows:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -_product(second, _product(_blocks(lower, 2 * size, size), first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse, size = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2), 2 * size
    return inverse[..., 0, :C, :C]


def _blocks(x: jax.Array, step: int, down: int) -> jax.Array:
    """Return the blocks [..., n, size, size] of x [..., C, C] whose first column is a multiple of `step`, and whose
    first row is `down` after it; size is `down`, or else the step."""
    size = down or step
    starts = range(0, x.shape[-1], step)
    return jnp.stack([x[..., i + down : i + down + size, i : i + size] for i in starts], axis=-3)
