"""Direct preference optimisation: rows of pairs, the loss and its metrics, and a run that learns what is preferred."""

import json
import math

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
import tokenizer_fixtures
from flax import nnx
from tokenizer_fixtures import CHATML

from jaxlm.data.config import DataConfig
from jaxlm.data.conversations import NotAConversation, Preference
from jaxlm.data.dataset import prepare
from jaxlm.data.packing import CHOSEN, REJECTED, NothingToLearn, PreferenceRows, cut_remark, rows_of
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.tree import abstract
from jaxlm.parallel.batches import put_batch
from jaxlm.training import references
from jaxlm.training.config import DPOConfig
from jaxlm.training.step import TrainStep

TOKENIZER = tokenizer_fixtures.chatml()
BETA = 0.3


def pairs(folder, number=24):
    """Write records in which answers are the question said again, and rejected ones are not; return their dataset."""
    folder.mkdir(exist_ok=True)
    TOKENIZER.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(CHATML)
    lines = [{"prompt": f"{i}?", "chosen": f"{i}", "rejected": "no" * (1 + i % 3)} for i in range(number)]
    (folder / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = {"tokenizer": str(folder / "tokenizer.json"), "cache": str(folder / "cache"), "held_out": 0.2}
    return prepare(DataConfig(preferences=str(folder / "x.jsonl"), **keys), 300)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return rows_of(pairs(tmp_path_factory.mktemp("pairs")).sources["data"].train, 96)


def batch_of(rows, numbers):
    each = [rows[i] for i in numbers]
    return {name: jnp.asarray(np.stack([row[name] for row in each])) for name in each[0]}


def test_a_row_holds_both_answers_apart(rows):
    assert isinstance(rows, PreferenceRows)
    for number in range(len(rows)):
        row = rows[number]
        said = [TOKENIZER.spelled_out(row["targets"][row["segments"] == part].tolist()) for part in (CHOSEN, REJECTED)]
        assert said[0].removesuffix("<|im_end|>").isdigit() and said[1].removesuffix("<|im_end|>").strip("no") == ""
        assert (row["positions"] == 0).sum() == 3, "two conversations, and padding"


def test_a_pair_longer_than_a_row_loses_ends(rows):
    short = PreferenceRows(rows.store, 48)
    assert "15 of 18 pairs are longer than training.sequence = 48 tokens (the longest has 54)" in cut_remark(short)
    for number in range(len(short)):
        chosen, rejected = short.lengths(number)
        assert chosen + rejected <= 48 and min(chosen, rejected) >= min(24, *rows.lengths(number))
        assert len(short[number]["tokens"]) == 48


def test_a_pair_of_which_an_answer_keeps_no_token_is_left_out(rows):
    """Prompts of 21 tokens fit into half a row of 43, and those of 22 do not."""
    some = PreferenceRows(rows.store, 43)
    assert 0 < len(some) < len(rows) and some.left_out == len(rows) - len(some)
    assert f"{some.left_out} of them keep no token of an answer and are left out" in cut_remark(some)
    for number in range(len(some)):
        assert {CHOSEN, REJECTED} <= set(some[number]["segments"].tolist())
    with pytest.raises(NothingToLearn, match="none of the 18 pairs has a token to learn: .*sequence = 30 .* to 42"):
        PreferenceRows(rows.store, 30)


@pytest.mark.parametrize(
    "record, why",
    [
        ({"prompt": "x", "chosen": "y"}, "has no rejected, but 'prompt', 'chosen'"),
        ({"prompt": "x", "chosen": "y", "rejected": 3}, "has rejected that are no list"),
        ({"chosen": [{"role": "user", "content": "y"}], "rejected": "x"}, "has no answer of the assistant in chosen"),
    ],
)
def test_a_record_that_is_no_preference_says_why(record, why):
    with pytest.raises(NotAConversation, match=why):
        Preference.of_record(record)


def test_whole_conversations_have_the_prompt_that_they_share():
    question = {"role": "user", "content": "x"}
    before = [question, {"role": "assistant", "content": "which?"}, question]
    both = {name: [*before, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    found = Preference.of_record(both)
    assert [c.learned_from for c in found] == [3, 3]
    assert found == Preference.of_record({"prompt": before, "chosen": "chosen", "rejected": "rejected"})
    assert Preference.from_json(found.to_json()) == found


MODEL = model_fixtures.model(vocab_size=300, context_length=96)


def made(**training):
    settings = model_fixtures.sections(dtype="float32", batch=8, sequence=96, **training)
    return TrainStep(MODEL, *settings, model_fixtures.optimization(learning_rate=3e-3), DPOConfig(beta=BETA))


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_loss_begins_at_ln_2_and_the_margin_grows(rows, microbatches):
    mesh = meshes.make(devices=jax.devices()[:1])
    steps = made(microbatches=microbatches).jitted(mesh)
    with jax.set_mesh(mesh):
        state = steps.begin(model_fixtures.placed(MODEL, mesh))
        rows.reference = references.compute(steps.preference_logprobs, state.parameters, rows, 8, mesh, print)
        losses = []
        for step in range(12):
            state, metrics = steps.train(state, batch_of(rows, [(8 * step + i) % len(rows) for i in range(8)]))
            losses.append(float(metrics["loss"]))
            if step == 0:
                # Sums of some ten log-probabilities of about 5.7 nats, each rounded at 2⁻²³, times beta.
                assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
                assert abs(float(metrics["margin"])) < 1e-5
        assert losses[-1] < 0.3 and float(metrics["accuracy"]) == 1.0 and float(metrics["margin"]) > 1.0
        assert float(metrics["margin"]) == pytest.approx(
            float(metrics["chosen_reward"] - metrics["rejected_reward"]), rel=1e-4
        )


SHARED_ROWS = {"fsdp": 2, "context": 4}  # which does not divide the two numbers of `reference` for each row


def test_microbatches_of_pairs_lie_on_devices_that_share_rows(rows):
    step = made(microbatches=2)
    with jax.set_mesh(meshes.make(**SHARED_ROWS)):
        _, metrics = jax.eval_shape(step.train, jax.eval_shape(step.init), batch_of(rows, range(8)))
    assert metrics["loss"].shape == ()


@pytest.mark.exhaustive
def test_devices_that_share_rows_have_one_device_s_loss(rows):
    batch, losses = jax.device_get(batch_of(rows, range(8))), []
    batch["reference"] = np.random.default_rng(0).normal(-60, 3, (8, 2)).astype(np.float32)
    for mesh in (meshes.make(), meshes.make(**SHARED_ROWS)):
        with jax.set_mesh(mesh):
            steps = made(microbatches=2).jitted(mesh)
            state = steps.begin(model_fixtures.placed(MODEL, mesh))
            losses.append(float(steps.train(state, put_batch(batch, mesh))[1]["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_loss_is_that_of_the_paper(rows):
    """Against log-probabilities of each answer alone, by logits."""
    number, graph = 8, abstract(MODEL)[0]
    mesh = meshes.make(devices=jax.devices()[:1])
    documents = [rows.store.read(i, 0, int(length)).astype(np.int32) for i, length in enumerate(rows.store.lengths)]
    alone = np.zeros((2 * number, max(map(len, documents))), np.int32)
    learned = np.zeros(alone.shape, bool)
    for i in range(2 * number):
        alone[i, : len(documents[i])] = documents[i]
        learned[i, : len(documents[i])] = rows.store.learned(i, 0, len(documents[i]))

    @jax.jit
    def log_probabilities(parameters):
        module, positions = (
            nnx.merge(graph, parameters),
            jnp.broadcast_to(jnp.arange(alone.shape[1] - 1), alone[:, 1:].shape),
        )
        hidden, _, _ = module.hidden(jnp.asarray(alone[:, :-1]), positions, packed_causal_mask(positions))
        logs = jax.nn.log_softmax(module.logits(hidden))
        each = jnp.take_along_axis(logs, jnp.asarray(alone[:, 1:, None]), axis=-1)[..., 0]
        return jnp.sum(each * learned[:, 1:], axis=1)

    with jax.set_mesh(mesh):
        steps = made().jitted(mesh)
        state = steps.begin(model_fixtures.placed(MODEL, mesh))
        found = np.asarray(log_probabilities(state.parameters)).reshape(number, 2)
        reference = np.random.default_rng(0).normal(-60, 3, (number, 2)).astype(np.float32)
        batch = batch_of(rows, range(number)) | {"reference": jnp.asarray(reference)}
        np.testing.assert_allclose(steps.preference_logprobs(state.parameters, batch), found, rtol=1e-5)
        total, count = steps.evaluate(state.parameters, batch)
        _, metrics = steps.train(state, batch)
    rewards = BETA * (found - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    assert int(count) == number
    for loss in (float(total) / number, float(metrics["loss"])):
        np.testing.assert_allclose(loss, np.mean(np.log1p(np.exp(-margins))), rtol=1e-5)
    np.testing.assert_allclose(float(metrics["accuracy"]), np.mean(margins > 0))
    np.testing.assert_allclose(float(metrics["margin"]), np.mean(margins), rtol=1e-4, atol=1e-5)
