"""Activations by name, as references compute them and as kernels do."""

import jax
import jax.numpy as jnp

# Φ(−x) of x ≥ 0 is ½ exp(−x²/2) · Σ cₖ tᵏ with t = 1 / (1 + p x), after Abramowitz and Stegun, 7.1.26: six
# coefficients, fitted to 8 · 10⁻⁹ of erf over [0, 6] by least squares with weights raised where the error is largest.
# Highest power first.
_TAIL = (
    -0.22753737068466462,
    0.8866653827831318,
    -0.6354019311455484,
    0.6495607312881878,
    0.09138788321264596,
    0.23532530288409198,
)
_TAIL_P = 0.39 * 2**-0.5
_TANH_C, _TANH_CUBE = (2 / jnp.pi) ** 0.5, 0.044715


def silu(x: jax.Array) -> jax.Array:
    """Return x · σ(x) (arXiv:1702.03118)."""
    return x * jax.lax.logistic(x)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Return GELU's approximation by tanh (arXiv:1606.08415, section 2)."""
    return 0.5 * x * (1.0 + jnp.tanh(_TANH_C * (x + _TANH_CUBE * x * x * x)))


def relu(x: jax.Array) -> jax.Array:
    """Return max(x, 0), with derivative 0 at 0. NaN stays NaN, which Triton's own maximum would drop."""
    return jnp.where(x <= 0.0, 0.0, x)


def relu_squared(x: jax.Array) -> jax.Array:
    """Return max(x, 0)² (arXiv:2109.08668, section 3)."""
    positive = relu(x)
    return positive * positive


def _normal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return Φ(x), by operations that every kernel language has (Pallas's Triton has no erf), and exp(−x²/2)."""
    exponential = jnp.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + _TAIL_P * jnp.abs(x))
    series = jnp.full_like(x, _TAIL[0])
    for c in _TAIL[1:]:
        series = series * t + c
    tail = 0.5 * exponential * (series * t)
    return jnp.where(x < 0, tail, 1.0 - tail), exponential


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    return x * _normal(x)[0]


@_gelu.defjvp
def _gelu_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    below, exponential = _normal(x)
    return x * below, t * (below + (2 * jnp.pi) ** -0.5 * x * exponential)


def _gate(x: jax.Array, square: jax.Array) -> jax.Array:
    return 0.5 + 0.5 * jnp.tanh(x * (_TANH_C + _TANH_C * _TANH_CUBE * square))


@jax.custom_jvp
def _gelu_tanh(x: jax.Array) -> jax.Array:
    return x * _gate(x, x * x)


@_gelu_tanh.defjvp
def _gelu_tanh_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Derivative of `gelu_tanh` in two thirds of the operations that differentiating its formula takes."""
    (x,), (t,) = primals, tangents
    square = x * x
    gate = _gate(x, square)
    slope = 2 * _TANH_C + 6 * _TANH_C * _TANH_CUBE * square
    return x * gate, t * (gate + x * slope * (gate - gate * gate))


# x · Φ(x) (arXiv:1606.08415), exact.
REFERENCE = {
    "silu": silu,
    "gelu": lambda x: 0.5 * x * (1.0 + jax.lax.erf(x * 2**-0.5)),
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu_squared": relu_squared,
}
# The same in float32, to a few units in the last place, in fewer operations.
KERNEL = REFERENCE | {"gelu": _gelu, "gelu_tanh": _gelu_tanh}

# FLOPs per number, forward and backward (with forward again), of the formulas as they are written, and the
# transcendentals among them (erf is one). KERNEL takes fewer for gelu_tanh, and for gelu computes erf from an
# exponential and a series.
FLOPS = {"silu": (2, 6), "gelu": (5, 12), "gelu_tanh": (9, 21), "relu": (1, 2), "relu_squared": (2, 5)}
TRANSCENDENTALS = {"silu": (1, 1), "gelu": (1, 2), "gelu_tanh": (1, 1), "relu": (0, 0), "relu_squared": (0, 0)}


def check(operation: str, name: str | None, *, required: bool = False) -> None:
    """Raise ValueError if there is no activation with this name; None means none, and is refused if one is required."""
    if name is None and not required:
        return
    if not isinstance(name, str) or name not in REFERENCE:
        raise ValueError(f"{operation}: there is no activation {name!r}; there are {', '.join(REFERENCE)}")
