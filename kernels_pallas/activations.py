"""Activations by name, as references compute them and as kernels do."""

import jax
import jax.numpy as jnp

# erf(x) = x · p(x²) / q(x²) on [−4, 4], beyond which it is ±1 in float32: the rational approximation that Eigen and XLA
# use (a few units in the last place). Coefficients of p and q, highest power first.
_P = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


@jax.custom_jvp
def erf(x: jax.Array) -> jax.Array:
    """The error function of float32 numbers, by what every kernel language has: Pallas's Triton has no erf."""
    x = jnp.clip(x, -4.0, 4.0)
    square = x * x
    p, q = (jnp.full_like(x, coefficients[0]) for coefficients in (_P, _Q))
    for c in _P[1:]:
        p = p * square + c
    for c in _Q[1:]:
        q = q * square + c
    return x * p / q


@erf.defjvp
def _erf_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    return erf(x), t * (2 * jnp.pi**-0.5) * jnp.exp(-x * x)


def silu(x: jax.Array) -> jax.Array:
    """x · σ(x) (arXiv:1702.03118)."""
    return x * jax.lax.logistic(x)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU's approximation by tanh (arXiv:1606.08415, section 2)."""
    return 0.5 * x * (1.0 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def relu_squared(x: jax.Array) -> jax.Array:
    """max(x, 0)² (arXiv:2109.08668, section 3)."""
    positive = jnp.maximum(x, 0.0)
    return positive * positive


# x · Φ(x) (arXiv:1606.08415), exact.
REFERENCE = {
    "silu": silu,
    "gelu": lambda x: 0.5 * x * (1.0 + jax.lax.erf(x * 2**-0.5)),
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: jnp.maximum(x, 0.0),
    "relu_squared": relu_squared,
}
KERNEL = REFERENCE | {"gelu": lambda x: 0.5 * x * (1.0 + erf(x * 2**-0.5))}

# FLOPs per number, forward and backward with forward, and transcendentals among them, of which erf is one.
FLOPS = {"silu": (2, 6), "gelu": (5, 12), "gelu_tanh": (9, 21), "relu": (1, 2), "relu_squared": (2, 5)}
TRANSCENDENTALS = {"silu": (1, 1), "gelu": (1, 2), "gelu_tanh": (1, 1), "relu": (0, 0), "relu_squared": (0, 0)}


def check(operation: str, name: str | None, *, required: bool = False) -> None:
    """Raises ValueError where there is no activation with this name; None is none, unless one is required."""
    if name not in REFERENCE and (required or name is not None):
        raise ValueError(f"{operation}: there is no activation {name!r}; there are {', '.join(REFERENCE)}")
