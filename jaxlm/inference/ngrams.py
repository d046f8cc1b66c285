"""Drafts of next tokens that are looked up in a sequence itself: on the device, or on the host. Imports no JAX."""

from typing import Any

import numpy as np

NO_DRAFT = -1

_LONGEST = 3  # tokens at the end of a sequence that are looked up


def look_up(history_SL: Any, length_S: Any, drafts: int, xp: Any = np) -> Any:
    """Return the tokens that followed the last occurrence of a sequence's end in that sequence, int32 [S, drafts].

    Of the last three tokens as many as occur are looked up (n-gram look-up: Saxena 2023, "Prompt lookup decoding"; Yang
    et al. 2023, arXiv:2304.04487). What follows is continued with its period where it meets the end. `NO_DRAFT` where
    the last token has not occurred before.

    Args:
      history_SL: int32, the tokens of each sequence.
      length_S: int32, how many they are.
      xp: numpy for arrays on the host, jax.numpy for those on a device.
    """
    S, L = history_SL.shape
    at_1L, end_S1 = xp.arange(L)[None], length_S[:, None] - 1
    is_equal_SL, common_SL = at_1L < end_S1, xp.zeros((S, L), xp.int32)
    for back in range(_LONGEST):
        token_S1 = xp.take_along_axis(history_SL, xp.clip(end_S1 - back, 0, L - 1), axis=1)
        is_equal_SL &= (at_1L >= back) & (xp.roll(history_SL, back, axis=1) == token_S1)
        common_SL += is_equal_SL
    # The latest of the longest.
    best_S1 = xp.argmax(xp.where(common_SL > 0, common_SL * L + at_1L, -1), axis=1)[:, None]
    is_found_S1 = xp.take_along_axis(common_SL, best_S1, axis=1) > 0
    next_SK = best_S1 + 1 + xp.arange(drafts)[None] % xp.maximum(end_S1 - best_S1, 1)
    draft_SK = xp.take_along_axis(history_SL, xp.clip(next_SK, 0, L - 1), axis=1)
    return xp.where(is_found_S1, draft_SK, NO_DRAFT)
