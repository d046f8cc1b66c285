"""Look-up of table rows by index: token and position embedding.

The gradient that JAX gives a look-up is a scatter that adds in the dtype of the table: in bfloat16 the sum of a
frequent token's thousands of gradients would stand still. Here it is accumulated in float32, without a float32 table.
"""

import jax
import jax.numpy as jnp

from jaxlm.parallel.partition import by_shards


def looked_up(rows_PRD: jax.Array, index_BT: jax.Array) -> jax.Array:
    """Return the rows of a table [P, R, D] of P shards at these indices, int [B, T], as [B, T, D] in its dtype.

    An index beyond the table takes the nearest row. The gradient of a table narrower than float32 is accumulated in
    float32.
    """
    return (_rows if rows_PRD.dtype == jnp.float32 else _narrow_rows)(rows_PRD, index_BT)


def _rows(rows_PRD: jax.Array, index_BT: jax.Array) -> jax.Array:
    """Look up without moving the shards: each gives its own rows and zeros for others, and the results are summed."""
    shards, rows, _ = rows_PRD.shape

    def held(rows_RD: jax.Array, first: jax.Array) -> jax.Array:
        at_BT = jnp.clip(index_BT, 0, shards * rows - 1) - first
        x_BTD = jnp.take(rows_RD, at_BT, axis=0, mode="clip")
        return jnp.where(((0 <= at_BT) & (at_BT < rows))[..., None], x_BTD, 0)

    x_PBTD = jax.vmap(held)(rows_PRD, rows * jnp.arange(shards))
    # jnp.sum would add in float32, and send that: here one of the P is not zero.
    return jax.lax.reduce_sum(x_PBTD, axes=(0,))


_narrow_rows = jax.custom_vjp(_rows)


def _rows_forward(rows_PRD: jax.Array, index_BT: jax.Array) -> tuple[jax.Array, tuple]:
    # An empty array remembers shape and dtype, and lets the table go.
    return _rows(rows_PRD, index_BT), (index_BT, jnp.zeros((0, *rows_PRD.shape), rows_PRD.dtype))


def _rows_backward(saved: tuple, d_BTD: jax.Array) -> tuple[jax.Array, None]:
    """Accumulate gradients in float32: in bfloat16 the sum of a frequent token's thousands would stand still.

    Each device sums over its own tokens of the batch, and rounds before sums are sent.
    """
    index_BT, like = saved
    _, shards, rows, D = like.shape

    def zeros_after(shape: tuple[int, ...], dtype: jnp.dtype, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return zeros that are made when x is there, and x. XLA for several GPUs would make them as a step begins."""
        x, zero = jax.lax.optimization_barrier((x, jnp.zeros((), dtype)))
        return jnp.broadcast_to(zero, shape), x

    def added(d_BTD: jax.Array, index_BT: jax.Array) -> jax.Array:
        """Return the summed gradients [P, R, D].

        N tokens have at most N distinct rows, so sums are [N, D]; a float32 table may be far larger.
        """
        place_N = jnp.arange(index_BT.size)
        index_N, order_N = jax.lax.sort((jnp.clip(index_BT, 0, shards * rows - 1).reshape(-1), place_N), num_keys=1)
        begins_N = jnp.concatenate([jnp.ones(1, bool), index_N[1:] != index_N[:-1]])
        at_N = jax.lax.cummax(jnp.where(begins_N, place_N, 0))  # each sum stands where its index begins
        zeros_ND, d_BTD = zeros_after((index_BT.size, D), jnp.float32, d_BTD)
        sums_ND = zeros_ND.at[at_N].add(d_BTD.reshape(-1, D)[order_N].astype(jnp.float32), indices_are_sorted=True)
        zeros_RD, sums_ND = zeros_after((rows, D), like.dtype, sums_ND)

        def put(first: jax.Array) -> jax.Array:
            held_N = begins_N & (first <= index_N) & (index_N < first + rows)
            row_N = jnp.where(held_N, index_N - first, rows)  # past the last: dropped
            return zeros_RD.at[row_N].set(sums_ND.astype(like.dtype), mode="drop")

        return jax.vmap(put)(rows * jnp.arange(shards))

    d_GPRD = jax.vmap(added)(*(by_shards(x, "batch", "sequence") for x in (d_BTD, index_BT)))
    return jax.lax.reduce_sum(d_GPRD, axes=(0,)), None


_narrow_rows.defvjp(_rows_forward, _rows_backward)
