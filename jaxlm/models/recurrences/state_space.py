"""The state space of Mamba-2."""

import kernels_pallas
from jaxlm.models.doors.scan import Recurrence, TokenArray
from jaxlm.models.recurrences.matrix_state import matrix_recurrence


def state_space(heads: int, state_dim: int, head_dim: int, skip: TokenArray) -> Recurrence:
    """Return the recurrence of Mamba-2 of N heads (`kernels_pallas.state_space`).

    Its inputs are q and k [B, T, K, H], in Mamba C and B, v [B, T, N, V], there x, the logarithm g ≤ 0 of the decay and
    δ, both [B, T, N]. Outputs are [B, T, N, V] in the dtype of v. Its state [N, H, V] is called `matrix`. All is
    computed in float32. `skip`: [N].
    """
    return matrix_recurrence(kernels_pallas.state_space, heads, state_dim, head_dim, (skip,))
