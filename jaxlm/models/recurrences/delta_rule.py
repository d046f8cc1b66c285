"""The gated delta rule."""

import kernels_pallas
from jaxlm.models.doors.scan import Recurrence
from jaxlm.models.recurrences.matrix_state import matrix_recurrence


def gated_delta_rule(heads: int, key_dim: int, value_dim: int) -> Recurrence:
    """Return the gated delta rule of N heads (`kernels_pallas.gated_delta_rule`).

    Its inputs are q and k [B, T, K, H], v [B, T, N, V], the logarithm g ≤ 0 of the decay and β, both [B, T, N]. Its
    outputs are [B, T, N, V] in v's dtype. Its state [N, H, V] is called `matrix`. All is computed in float32.
    """
    return matrix_recurrence(kernels_pallas.gated_delta_rule, heads, key_dim, value_dim, is_delta=True)
