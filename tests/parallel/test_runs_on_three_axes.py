"""A run of a mixture whose experts, sequences and layers are shared out, with the losses of one device."""

import numpy as np
import pytest
import runs

SETTINGS = (
    "model.vocab_size=258",
    "model.attention.num_kv_heads=2",
    "model.norm.kind=rms",
    "model.position.kind=rope",
    "model.feed_forward.kind=mixture",
    "model.feed_forward.num_experts=4",
    "model.feed_forward.experts_per_token=2",
    "model.feed_forward.activation=silu",
    "training.dropout=0",
    "training.steps=8",
    "evaluation.every=4",
    "checkpoint.every=2",
)
AXES = ("mesh.expert=2", "mesh.context=2", "mesh.pipeline=2", "training.microbatches=2")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_has_the_losses_of_one_device_and_is_killed_and_resumed_to_the_bit(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    path = runs.write_config(text, *SETTINGS)
    one, whole, killed = (tmp_path / name for name in ("one", "whole", "killed"))
    process = runs.start(path, killed, *AXES, devices=8)
    runs.wait_for_step(process, killed, 5)
    process.kill()
    process.communicate()
    assert 0 < max(runs.losses(killed)) < 8
    runs.finish(runs.start(path, killed, *AXES, devices=8))
    runs.finish(runs.start(path, whole, *AXES, devices=8))
    runs.finish(runs.start(path, one))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        losses = runs.losses(whole, name)
        assert runs.losses(killed, name) == losses
        of_one = runs.losses(one, name)
        assert of_one.keys() == losses.keys()
        np.testing.assert_allclose(list(losses.values()), list(of_one.values()), rtol=1e-5)
