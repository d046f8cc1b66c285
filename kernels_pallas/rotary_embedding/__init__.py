"""Rotary position embedding, half-split and interleaved."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.core import checks, rows
from kernels_pallas.core.choice import choose
from kernels_pallas.core.eager import compiled_once
from kernels_pallas.core.launch import KernelCost, KernelCosts, size_of, vary
from kernels_pallas.core.measured import CallClass
from kernels_pallas.rotary_embedding import mosaic_tpu, reference, triton

_RUN = {"triton": triton.run, "mosaic_tpu": mosaic_tpu.run}
IMPLEMENTATIONS = tuple(_RUN)


def rotary_embedding(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    interleaved: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Rotate each pair of numbers of each head by its token's angle (Su et al. 2021, arXiv:2104.09864, section 3.2.2).

    Args:
      x: [..., N, H] in float32, bfloat16 or float16, H even: N heads of each token; arithmetic is float32.
      cos, sin: of the angles, [..., H/2] over the tokens of x, or over its last dimensions alone, such as [T, H/2] for
        x [B, T, N, H].
      interleaved: pairs are (x[2i], x[2i + 1]), as in the paper and in GPT-J; otherwise (x[i], x[i + H/2]), as in
        GPT-NeoX and Llama.
      implementation: "reference", "triton" or "mosaic_tpu"; None chooses by the chip being lowered for and the shape.

    Returns [..., N, H] in x's dtype. cos and sin are differentiable too.

    Under a mesh of several devices the kernels run inside `jax.shard_map`; elsewhere None is "reference".

    Raises ValueError for operands that do not fit, NotImplementedError for an implementation that cannot serve.
    """
    _check(x, cos, sin, interleaved)
    serves = functools.partial(rows.unsupported_reason, x, max_width=None)
    chosen = choose("rotary_embedding", implementation, dict.fromkeys(_RUN, serves), call=CallClass.of_rows(x))
    if chosen == "reference" or x.size == 0:
        return reference.rotary_embedding(x, cos, sin, interleaved=interleaved)
    shape = _shape_of_angles(cos, sin)
    angles = (jnp.broadcast_to(a, shape).reshape(-1, shape[-1]) for a in (cos, sin))
    operands = vary(x.reshape(-1, *x.shape[-2:]), *angles)
    return _rotate(_RotarySettings(chosen, interleaved), *operands).reshape(x.shape)


def costs(x: jax.Array, cos: jax.Array, sin: jax.Array, **_: Any) -> KernelCosts:
    """Return the kernels' costs on these arrays, or shapes and dtypes: backward rotates by negative angles at equal
    cost.
    """
    angles = [jax.ShapeDtypeStruct(_shape_of_angles(cos, sin), a.dtype) for a in (cos, sin)]
    one = _cost(x, *angles)
    return KernelCosts(one, one)


def _shape_of_angles(cos, sin) -> tuple[int, ...]:
    """Return the shape of the angles: that of cos or of sin, whichever has more dimensions."""
    return max(cos.shape, sin.shape, key=len)


class _RotarySettings(NamedTuple):
    implementation: str
    interleaved: bool


def _cost(x, cos, sin) -> KernelCost:
    return KernelCost(flops=3 * x.size, bytes=size_of(x, x, cos, sin))


@compiled_once(static=2)
def _run(settings: _RotarySettings, inverse: bool, x_MNH, cos_AP, sin_AP) -> jax.Array:
    return _RUN[settings.implementation](
        x_MNH,
        cos_AP,
        sin_AP,
        inverse=inverse,
        interleaved=settings.interleaved,
        cost=_cost(x_MNH, cos_AP, sin_AP),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(settings, x_MNH, cos_AP, sin_AP):
    return _run(settings, False, x_MNH, cos_AP, sin_AP)


def _fwd(settings, x, cos, sin):
    # Only the gradients of angles need x again: it is not saved where angles are constants.
    kept = x.value if cos.perturbed or sin.perturbed else None
    return _run(settings, False, x.value, cos.value, sin.value), (kept, cos.value, sin.value)


def _bwd(settings, saved, d_y):
    x, cos, sin = saved
    d_x = _run(settings, True, d_y, cos, sin)
    if x is None:
        return d_x, jnp.zeros_like(cos), jnp.zeros_like(sin)
    tokens = (-1, len(cos), *x.shape[1:])
    plain = functools.partial(reference.rotary_embedding, x.reshape(tokens), interleaved=settings.interleaved)
    return d_x, *jax.vjp(plain, cos, sin)[1](d_y.reshape(tokens))


_rotate.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _check(x, cos, sin, interleaved) -> None:
    checks.array("rotary_embedding", x=x, cos=cos, sin=sin)
    checks.boolean("rotary_embedding", interleaved=interleaved)
    if x.ndim < 2:
        raise ValueError(f"rotary_embedding: x has shape {list(x.shape)}; it must be [..., N, H]")
    checks.floating("rotary_embedding", x=x, cos=cos, sin=sin)
    if x.shape[-1] % 2:
        raise ValueError(f"rotary_embedding: heads are {x.shape[-1]} wide; they must be even, pairs are rotated")
    for name, angle in (("cos", cos), ("sin", sin)):
        *tokens, pairs = angle.shape or (0,)
        wanted = (*x.shape[:-2], x.shape[-1] // 2)
        if pairs != wanted[-1] or tuple(tokens) != x.shape[:-2][x.ndim - 2 - len(tokens) :]:
            raise ValueError(
                f"rotary_embedding: {name} has shape {list(angle.shape)}; it must be {list(wanted)}, or its last part"
            )
