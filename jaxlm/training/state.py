"""The state of training, of which a checkpoint holds what a resumed run needs."""

from typing import NamedTuple

import jax
import optax

from jaxlm.models.tree import Tree


class LocalState(NamedTuple):
    """The arrays that `training.local_sgd` keeps beside the outer parameters, float32.

    `parameters`: of the replicas, [R, …] each. `momentum`: of the outer optimizer, as the parameters.
    """

    parameters: Tree
    momentum: Tree


class TrainState(NamedTuple):
    """Everything that a resumed run needs; the position in the data is `step`.

    Under `training.local_sgd` each of R replicas has its own `working` and `optimizer`, arrays [R, …], and its
    parameters are in `local`.
    """

    step: jax.Array  # batches consumed, int32
    parameters: Tree  # those that train, float32; under `training.local_sgd` the outer ones
    # The parameters in the dtype of the computation, which the update rounds in its own pass; None where that dtype is
    # float32. No checkpoint holds it.
    working: Tree | None
    optimizer: optax.OptState
    skipped: jax.Array  # steps whose update was not finite, int32
    skipped_in_a_row: jax.Array
    average: Tree | None  # of the parameters, float32; None without `training.ema_decay`
    # What adapters adapt and what is beside it, in the dtype of the computation or quantised: it stays, and no
    # checkpoint holds it.
    base: Tree
    local: LocalState | None = None  # None without `training.local_sgd`
