"""Linear attention in chunks, in plain JAX: products within a chunk, a scan from one to the next."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.core.chunk_scan import scan_chunks
from kernels_pallas.core.unfused import unfused
from kernels_pallas.linear_attention.triangular import solved
from kernels_pallas.linear_attention.unit import unit

# Takes the matrices [B, K, G, H, V] before the tokens, the tokens' documents [B, C] and arrays of tokens, the first
# three q and k [B, K, C, H] and v [B, K, G, C, V]; returns outputs [B, K, G, C, V] and the matrices after.
_Function = Callable[..., tuple[jax.Array, jax.Array]]


def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    is_token: jax.Array,
    begins: jax.Array,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.gated_delta_rule`."""

    def step(state: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return _delta_chunk(state, *arrays)

    arrays = is_token, begins, query, key, value, log_decay, beta
    state, outputs = scan_chunks(step, state, arrays, chunk)
    return outputs, state


def state_space(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    delta: jax.Array,
    skip: jax.Array,
    state: jax.Array,
    is_token: jax.Array,
    begins: jax.Array,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.state_space`."""

    skip = skip.astype(jnp.float32)  # here, so that gradients of several chunks are summed in float32

    def step(state: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return _state_space_chunk(state, *arrays, skip)

    arrays = is_token, begins, query, key, value, log_decay, delta
    state, outputs = scan_chunks(step, state, arrays, chunk)
    return outputs, state


def _delta_chunk(
    state_BNHV: jax.Array,
    is_token_BC: jax.Array,
    begins_BC: jax.Array,
    q_BCKH: jax.Array,
    k_BCKH: jax.Array,
    v_BCNV: jax.Array,
    g_BCN: jax.Array,
    beta_BCN: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute a chunk: the tokens' changes d = β·(v − Sᵀk) of the state solve a triangular system (section 3.3)."""
    K, H = q_BCKH.shape[2:]
    is_token_BC1 = is_token_BC[:, :, None]
    q_BKCH = jnp.swapaxes(unit(q_BCKH) * H**-0.5, 1, 2)
    k_BKCH = jnp.swapaxes(unit(k_BCKH) * is_token_BC1[..., None], 1, 2)
    beta_BKGC, g_BKGC = (_by_group(jnp.where(is_token_BC1, x, 0.0), K) for x in (beta_BCN, g_BCN))
    arrays = q_BKCH, k_BKCH, _by_group(v_BCNV, K), jnp.cumsum(g_BKGC, axis=3), beta_BKGC
    documents = documents_in_chunk(is_token_BC, begins_BC)
    state_BNHV, y_BCNV = _through(state_BNHV, documents, _delta_token, _delta_tokens, *arrays)
    return state_BNHV, y_BCNV.astype(v_BCNV.dtype)


def _state_space_chunk(
    state_BNHV: jax.Array,
    is_token_BC: jax.Array,
    begins_BC: jax.Array,
    q_BCKH: jax.Array,
    k_BCKH: jax.Array,
    v_BCNV: jax.Array,
    g_BCN: jax.Array,
    delta_BCN: jax.Array,
    skip_N: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute a chunk (section 6, by blocks)."""
    K = q_BCKH.shape[2]
    is_token_BC1, float32 = is_token_BC[:, :, None], jnp.float32
    delta_BCN, g_BCN = (jnp.where(is_token_BC1, x.astype(float32), 0.0) for x in (delta_BCN, g_BCN))
    q_BKCH, k_BKCH = (jnp.swapaxes(x.astype(float32), 1, 2) for x in (q_BCKH, k_BCKH))
    dtype, v_BCNV = v_BCNV.dtype, v_BCNV.astype(float32)
    written_BKGCV = _by_group(v_BCNV * delta_BCN[..., None], K)
    arrays = q_BKCH, k_BKCH, written_BKGCV, jnp.cumsum(_by_group(g_BCN, K), axis=3)
    documents = documents_in_chunk(is_token_BC, begins_BC)
    state_BNHV, y_BCNV = _through(state_BNHV, documents, _state_space_token, _state_space_tokens, *arrays)
    return state_BNHV, (y_BCNV + skip_N[None, None, :, None] * v_BCNV).astype(dtype)


def documents_in_chunk(is_token_BC: jax.Array, begins_BC: jax.Array) -> jax.Array:
    """Return the documents that have begun up to each token of a chunk, int32: 0 is the one that the state before it is
    of."""
    return jnp.cumsum(begins_BC & is_token_BC, axis=1, dtype=jnp.int32)


def _through(
    state_BNHV: jax.Array, document_BC: jax.Array, token: _Function, tokens: _Function, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the states after a chunk, and its outputs [B, C, N, V]: by the function of one token, or of several."""
    B, K, G, C, V = arrays[2].shape
    y_BKGCV, after_BKGHV = (token if C == 1 else tokens)(state_BNHV.reshape(B, K, G, -1, V), document_BC, *arrays)
    return after_BKGHV.reshape(state_BNHV.shape), jnp.moveaxis(y_BKGCV, 3, 1).reshape(B, C, K * G, V)


def _decayed(state_BKGHV: jax.Array, document_B1: jax.Array, g_BKG1: jax.Array) -> jax.Array:
    """Return what is left of a state before a token: zeros where a document begins with it."""
    of_document_B = (document_B1 == 0)[:, 0, None, None, None, None]
    return jnp.where(of_document_B, unfused(state_BKGHV * jnp.exp(g_BKG1)[..., None]), 0.0)


def _column(x_BK1H: jax.Array) -> jax.Array:
    """Return one token's vectors as [B, K, 1, H, 1]."""
    return jnp.swapaxes(x_BK1H, 2, 3)[:, :, None]


def _read(state_BKGHV: jax.Array, x_BK1H: jax.Array) -> jax.Array:
    """Return Sᵀx [B, K, G, 1, V], in float32.

    A product with a vector, which XLA writes as multiplications and sums for GPUs and TPUs, and fuses with what makes
    the state. A CPU would compute such sums, over the last axis but one, number by number.
    """
    x_BKGH = jnp.broadcast_to(x_BK1H, (*state_BKGHV.shape[:3], x_BK1H.shape[3]))
    return jnp.einsum("BKGH,BKGHV->BKGV", x_BKGH, state_BKGHV, precision="highest")[:, :, :, None]


def _delta_token(
    state_BKGHV: jax.Array,
    document_B1: jax.Array,
    q_BK1H: jax.Array,
    k_BK1H: jax.Array,
    v_BKG1V: jax.Array,
    g_BKG1: jax.Array,
    beta_BKG1: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute one token: the state is read twice."""
    state_BKGHV = _decayed(state_BKGHV, document_B1, g_BKG1)
    change_BKG1V = beta_BKG1[..., None] * (v_BKG1V - _read(state_BKGHV, k_BK1H))
    state_BKGHV += unfused(_column(k_BK1H) * change_BKG1V)
    return _read(state_BKGHV, q_BK1H), state_BKGHV


def _delta_tokens(
    state_BKGHV: jax.Array,
    document_BC: jax.Array,
    q_BKCH: jax.Array,
    k_BKCH: jax.Array,
    v_BKGCV: jax.Array,
    total_BKGC: jax.Array,
    beta_BKGC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute several tokens; `total_BKGC` has the sums of g from the first token on."""
    decay_BKGCC, before_BKGC = _decays(document_BC, total_BKGC)

    # Keys and queries apart: one product of both would need copies to put them together and to part its results.
    of_keys_BKGCC, of_queries_BKGCC = (
        jnp.einsum("BKiH,BKjH->BKij", x_BKCH, k_BKCH)[:, :, None] * decay_BKGCC for x_BKCH in (k_BKCH, q_BKCH)
    )
    found_BKGCV, read_BKGCV = (
        before_BKGC[..., None] * jnp.einsum("BKCH,BKGHV->BKGCV", x_BKCH, state_BKGHV) for x_BKCH in (k_BKCH, q_BKCH)
    )
    system_BKGCC = jnp.tril(beta_BKGC[..., None] * of_keys_BKGCC, -1)
    change_BKGCV = solved(system_BKGCC, beta_BKGC[..., None] * (v_BKGCV - found_BKGCV))
    y_BKGCV = read_BKGCV + jnp.einsum("BKGij,BKGjV->BKGiV", of_queries_BKGCC, change_BKGCV)
    # What the last token sees of each is what is left of it after the chunk: padding decays nothing.
    left_BKGCV = decay_BKGCC[..., -1, :, None] * change_BKGCV
    after_BKGHV = before_BKGC[..., -1, None, None] * state_BKGHV
    return y_BKGCV, after_BKGHV + jnp.einsum("BKCH,BKGCV->BKGHV", k_BKCH, left_BKGCV)


def _state_space_token(
    state_BKGHV: jax.Array,
    document_B1: jax.Array,
    q_BK1H: jax.Array,
    k_BK1H: jax.Array,
    v_BKG1V: jax.Array,
    g_BKG1: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute one token."""
    state_BKGHV = _decayed(state_BKGHV, document_B1, g_BKG1) + unfused(_column(k_BK1H) * v_BKG1V)
    return _read(state_BKGHV, q_BK1H), state_BKGHV


def _state_space_tokens(
    state_BKGHV: jax.Array,
    document_BC: jax.Array,
    q_BKCH: jax.Array,
    k_BKCH: jax.Array,
    v_BKGCV: jax.Array,
    total_BKGC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Compute several tokens; `total_BKGC` has the sums of g from the first token on."""
    decay_BKGCC, before_BKGC = _decays(document_BC, total_BKGC)
    scores_BKGCC = jnp.einsum("BKiH,BKjH->BKij", q_BKCH, k_BKCH)[:, :, None] * decay_BKGCC
    y_BKGCV = jnp.einsum("BKGij,BKGjV->BKGiV", scores_BKGCC, v_BKGCV)
    y_BKGCV += before_BKGC[..., None] * jnp.einsum("BKCH,BKGHV->BKGCV", q_BKCH, state_BKGHV)
    # What the last token sees of each is what is left of it after the chunk: padding decays nothing.
    left_BKGCV = decay_BKGCC[..., -1, :, None] * v_BKGCV
    after_BKGHV = before_BKGC[..., -1, None, None] * state_BKGHV
    return y_BKGCV, after_BKGHV + jnp.einsum("BKCH,BKGCV->BKGHV", k_BKCH, left_BKGCV)


def _decays(document_BC: jax.Array, total_BKGC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what each token (row) sees of every token of a chunk, [B, K, G, C, C], zero of later ones and of other
    documents; and what it sees of the state before the chunk, [B, K, G, C].

    Args:
      document_BC: of each token, 0 for the one that the state is of.
      total_BKGC: the sums of the logarithms of decays from the first token on, float32.
    """
    C = document_BC.shape[1]
    is_read_BCC = (document_BC[:, :, None] == document_BC[:, None, :]) & jnp.tril(jnp.ones((C, C), bool))[None]
    between_BKGCC = total_BKGC[..., :, None] - total_BKGC[..., None, :]
    decay_BKGCC = jnp.exp(jnp.where(is_read_BCC[:, None, None], between_BKGCC, -jnp.inf))
    return decay_BKGCC, jnp.where((document_BC == 0)[:, None, None], jnp.exp(total_BKGC), 0.0)


def _by_group(x_BCN: jax.Array, groups: int) -> jax.Array:
    """Return numbers of heads as [B, K, N / K, C, …], those of each of K groups together, in float32."""
    B, C, N, *rest = x_BCN.shape
    return jnp.moveaxis(x_BCN.astype(jnp.float32).reshape(B, C, groups, N // groups, *rest), 1, 3)
