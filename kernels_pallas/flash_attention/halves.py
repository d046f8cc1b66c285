"""Splits of an attention call in two, by sequences, queries or keys: settings, operands and rows of each half.

Rows are the arrays of the backward pass that belong to queries: [B, N, T], or [B, T, N, V].
"""

import dataclasses
from collections.abc import Iterator

import jax

from kernels_pallas.core.attention.key_range import KeyRange, clipped, shifted
from kernels_pallas.core.attention.scores import FlashSettings
from kernels_pallas.flash_attention.operands import Operands


def of_sequences(settings: FlashSettings, operands: Operands, *rows: jax.Array) -> Iterator[tuple]:
    """Yield the calls on each half of the batch."""
    B = operands.sizes[0]
    for half, its_settings in _halves(settings, -(-B // 2), B):
        bias = operands.bias
        cut = operands._replace(
            **{name: getattr(operands, name)[half] for name in ("query", "key", "value", "start", "end")},
            bias=bias if bias is None or bias.shape[0] == 1 else bias[half],
        )
        yield its_settings, cut, *(x[half] for x in rows)


def of_queries(settings: FlashSettings, operands: Operands, middle: int, *rows: jax.Array) -> Iterator[tuple]:
    """Yield the calls on the queries before `middle` and from there on."""
    for half, its_settings in _halves(settings, middle, operands.sizes[1]):
        bias = operands.bias
        cut = operands._replace(
            query=operands.query[:, half],
            start=operands.start[:, half],
            end=operands.end[:, half],
            bias=bias if bias is None or bias.shape[2] == 1 else bias[:, :, half],
        )
        yield its_settings, cut, *(x[:, half] if x.ndim == 4 else x[:, :, half] for x in rows)


def of_keys(settings: FlashSettings, operands: Operands, middle: int, *rows: jax.Array) -> Iterator[tuple]:
    """Yield the calls on the keys before `middle` and from there on."""
    for half, its_settings in _halves(settings, middle, operands.sizes[2]):
        key, key_range = operands.key[:, half], shifted(KeyRange(operands.start, operands.end), half.start)
        (start,), (end,) = clipped(key_range, *operands.start.shape, key.shape[1])
        cut = operands._replace(
            key=key,
            value=operands.value[:, half],
            start=start,
            end=end,
            bias=None if operands.bias is None else operands.bias[..., half],
        )
        yield its_settings, cut, *rows


def _halves(settings: FlashSettings, middle: int, length: int) -> Iterator[tuple[slice, FlashSettings]]:
    """Yield both slices with their settings: unmasked scores are divided in proportion to length."""
    before = settings.unmasked_scores * middle // length
    yield slice(0, middle), dataclasses.replace(settings, unmasked_scores=before)
    yield slice(middle, length), dataclasses.replace(settings, unmasked_scores=settings.unmasked_scores - before)
