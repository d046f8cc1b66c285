"""A matrix with several adapters, one for each row of a batch, as a module in the place of others."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlm.models.adapted_matrix import AdaptedMatrix


class MultiAdaptedMatrix(AdaptedMatrix):
    """A matrix W and the adapters A_i, B_i of several models, for a step without gradients: x·W + (x·A_i)·B_i for a
    row of adapter i, and x·W for a row of none.

    The adapters lie side by side: `a` is [*inputs, Σ ranks], the columns A_1, A_2, …, and `b` is [Σ ranks, *outputs],
    their scales included. All rows are multiplied by all columns, and each row keeps those of its own adapter. So each
    matrix is read once in a step, whichever adapters its rows have, and a row is computed in one way, whatever the
    rows beside it have. (Punica, Chen et al. 2023, arXiv:2310.18547, gathers the matrices of each row instead, which is
    less work where there are hundreds of adapters.)

    Attributes:
      owners: the adapter of each column, from 1 on.
      adapter: int32 [rows], the adapter of each row of the batch, 0 for none; each step puts it here.
    """

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[str, ...], inputs: int, owners: tuple[int, ...], rngs: nnx.Rngs
    ):
        """Declare the adapters of a matrix of this shape and these axes, the first `inputs` of which it contracts. The
        matrix becomes `base` afterwards."""
        super().__init__(shape, axes, inputs, len(owners), 1.0, rngs)
        self.owners = owners
        self.adapter = nnx.Variable(jnp.zeros(1, jnp.int32))

    def own(self, x_BTR: jax.Array) -> jax.Array:
        """Return x·A of all adapters with zeros in the columns that are not of the row's adapter. T is 1."""
        is_own = self.adapter[...][:, None, None] == np.asarray(self.owners)[None, None]
        return jnp.where(is_own, x_BTR, jnp.zeros((), x_BTR.dtype))

    def added(self, y: jax.Array, of_adapter: jax.Array) -> jax.Array:
        """Return the sum of both, and y as it is in rows without an adapter."""
        has_adapter = self.adapter[...].reshape(-1, *(1,) * (y.ndim - 1)) > 0
        return jnp.where(has_adapter, y + of_adapter, y)
