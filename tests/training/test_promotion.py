"""Steps under `JAX_NUMPY_DTYPE_PROMOTION=strict`, as some users set it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import meshes
import pytest
from matrices import sampled

from jaxlm.config import load
from jaxlm.training.step import TrainStep

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
# Each part of a step, of the model and of the optimizers that mixes dtypes.
SETTINGS = [
    ["training.microbatches=2", "training.ema_decay=0.9", "training.z_loss=0.1", "training.dropout=0.1"],
    ["model.norm.kind=layer", "model.logit_soft_cap=30.0", "model.attention.soft_cap=20.0", "model.attention.window=8"],
    *(
        [f"optimizer.kind={kind}", f"optimizer.schedule={{kind='{schedule}',warmup_steps=3}}"]
        for kind, schedule in (
            ("muon", "linear"),
            ("adafactor", "warmup_stable_decay"),
            ("lion", "constant"),
            ("sgd", "cosine"),
        )
    ),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings[0])
@pytest.mark.parametrize("dtype", sampled(["float32", "bfloat16"], ["bfloat16"]))
def test_a_step_promotes_no_dtype_implicitly(settings, dtype):
    experiment = load(QUICKSTART, [f"execution.dtype={dtype}", *settings])
    training = experiment.training
    row = jax.ShapeDtypeStruct((training.batch, training.sequence), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), row)
    with jax.numpy_dtype_promotion("strict"), jax.set_mesh(meshes.make()):
        steps = TrainStep(experiment.model, experiment.execution, training, experiment.optimizer)
        state = jax.eval_shape(steps.init)
        _, metrics = jax.eval_shape(steps.train, state, batch)
        loss, _ = jax.eval_shape(steps.evaluate, state.parameters, batch)
        jax.eval_shape(steps.norms, state, batch)
    assert metrics["loss"].dtype == metrics["learning_rate"].dtype == loss.dtype == jnp.float32
