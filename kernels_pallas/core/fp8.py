"""Numbers of eight bits, of which older GPUs have no instruction."""

import jax
import jax.numpy as jnp

_CONVERTS = (8, 9)  # the first compute capability that does
_SIGN = -0x8000  # the highest bit of an int16


def is_converted(compute_capability: tuple[int, int] | None) -> bool:
    """Return whether GPUs of a compute capability, or of one that is not known, convert float8_e4m3fn."""
    return (compute_capability or _CONVERTS) >= _CONVERTS


def from_bytes(byte: jax.Array) -> jax.Array:
    """Return the numbers of bytes (int8) in E4M3 (arXiv:2209.05433), in float32."""
    # As float16 the bits are a number of 2⁻⁸ times the value: it has one bit of exponent more, and another bias.
    bits = (byte.astype(jnp.int16) << 7) & (_SIGN | 0x3F80)
    number = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 2.0**8
    return jnp.where((byte & 127) == 127, jnp.nan, number)
