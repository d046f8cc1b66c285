import re

import chex
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from markers import ELSEWHERE
from matrices import sampled

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.programs import step_programs
from jaxlm.models import tree
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.rows import Auxiliary
from jaxlm.parallel.batches import put_batch
from jaxlm.training.config import CosineScheduleConfig
from jaxlm.training.schedules import schedule
from jaxlm.training.step import TrainStep
from kernels_pallas.linear_cross_entropy.xla import cross_entropy

pytestmark = pytest.mark.usefixtures("programs_once")


def test_cross_entropy_is_minus_the_log_of_the_softmax():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(2, 3, 11)).astype(np.float32) * 30
    targets = draw.integers(0, 11, (2, 3))
    exact = logits.astype(np.float64)
    exact = np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)) + exact.max(-1)
    exact -= np.take_along_axis(logits.astype(np.float64), targets[..., None], -1)[..., 0]
    losses, log_z = cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    np.testing.assert_allclose(losses, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(log_z, np.logaddexp.reduce(logits.astype(np.float64), -1), rtol=1e-6)


# Losses of the first, second and tenth step as they were when the numerics were first checked against numpy and
# against one another on every mesh; what changes them changes the model, its initialisation or the optimizer.
GOLDEN = {
    "llama": (4.58691, 3.45102, 0.50352),
    "gpt2": (4.89084, 4.36175, 1.35732),
    "qwen3": (4.80695, 3.88943, 0.87214),
}


@pytest.mark.parametrize("family", sampled(GOLDEN, ["gpt2", "llama"]))
def test_golden_losses(family):
    metrics, _ = model_fixtures.run_steps(
        model_fixtures.model(model_fixtures.FAMILIES[family]),
        model_fixtures.sections(),
        [model_fixtures.batch()] * 10,
        initialised=True,
    )
    losses = [metrics[i]["loss"] for i in (0, 1, 9)]
    # Ten steps carry the rounding of other processors along; they do not carry it further than this.
    np.testing.assert_allclose(losses, GOLDEN[family], rtol=1e-3)


def test_only_targets_that_count_are_counted():
    batch = model_fixtures.batch()
    changed = {**batch, "targets": np.where(batch["segments"] > 0, batch["targets"], 7)}
    (a,), _ = model_fixtures.run_steps(model_fixtures.model(), model_fixtures.sections(), [batch])
    (b,), _ = model_fixtures.run_steps(model_fixtures.model(), model_fixtures.sections(), [changed])
    assert a["loss"] == b["loss"] and a["tokens"] == (batch["segments"] > 0).sum()


@pytest.mark.parametrize("microbatches", sampled([2, 4, 8], ["4"]))
def test_microbatches_equal_the_whole_batch_though_their_targets_differ_in_number(microbatches):
    batch = model_fixtures.batch()
    batch["segments"][0] = 0  # one row counts nothing at all
    batch["segments"][1, 5:] = 0
    whole, whole_state = model_fixtures.run_steps(model_fixtures.model(), model_fixtures.sections(), [batch])
    parts, parts_state = model_fixtures.run_steps(
        model_fixtures.model(), model_fixtures.sections(microbatches=microbatches), [batch]
    )
    model_fixtures.assert_same_numbers(parts[0]["loss"], whole[0]["loss"], 1e-5)
    model_fixtures.assert_same_numbers(parts_state.optimizer[1][0].mu, whole_state.optimizer[1][0].mu, 1e-4)


def test_a_batch_without_targets_moves_nothing_and_is_no_error():
    batch = model_fixtures.batch()
    batch["segments"][:] = 0
    (metrics,), state = model_fixtures.run_steps(model_fixtures.model(), model_fixtures.sections(), [batch])
    assert metrics["loss"] == 0.0 and metrics["skipped"] == 0 and state.step == 1


def test_weights_decay_and_gains_and_biases_do_not():
    model = model_fixtures.model(model_fixtures.GPT2)
    batch = model_fixtures.batch()
    batch["segments"][:] = 0  # no gradient: what moves is decay
    settings = model_fixtures.optimization()
    _, state = model_fixtures.run_steps(model, model_fixtures.sections(), [batch], optimization=settings)
    _, abstract = tree.abstract(model)
    before = tree.paths(model_fixtures.parameters(model))
    after, dimensions = tree.paths(state.parameters), tree.paths(tree.dimensions(abstract))
    for path, old in before.items():
        shrunk = old * (1 - settings.learning_rate * settings.weight_decay) if dimensions[path].inputs else old
        np.testing.assert_allclose(after[path], shrunk, rtol=1e-6, err_msg=path)


def test_one_step_is_adamw_by_hand():
    model, settings = model_fixtures.model(), model_fixtures.optimization(weight_decay=0.0, clip_norm=1e9)
    _, state = model_fixtures.run_steps(
        model, model_fixtures.sections(), [model_fixtures.batch()], optimization=settings
    )
    before = model_fixtures.parameters(model)
    gradient = jax.tree.map(lambda m: m / (1 - settings.beta1), state.optimizer[1][0].mu)
    # After one step the corrected moments are g and g², and the update is lr · g / (|g| + ε).
    expected = jax.tree.map(
        lambda p, g: p - settings.learning_rate * g / (np.abs(g) + settings.epsilon), before, gradient
    )
    chex.assert_trees_all_close(state.parameters, expected, atol=1e-6)


def test_clipping_bounds_the_gradient_and_reports_it_unclipped():
    free, _ = model_fixtures.run_steps(model_fixtures.model(), model_fixtures.sections(), [model_fixtures.batch()])
    settings = model_fixtures.optimization(clip_norm=0.01)
    clipped, state = model_fixtures.run_steps(
        model_fixtures.model(), model_fixtures.sections(), [model_fixtures.batch()], optimization=settings
    )
    assert clipped[0]["grad_norm"] == free[0]["grad_norm"] > 0.01
    squares = sum(np.sum(np.square(m)) for m in jax.tree.leaves(state.optimizer[1][0].mu))
    norm = np.sqrt(squares) / (1 - settings.beta1)
    np.testing.assert_allclose(norm, 0.01, rtol=1e-4)


def poisoned(model, at_steps, steps=6, **training):
    """Run steps with a NaN embedding of token 0, which occurs in the given steps only."""
    mesh = meshes.make()
    with jax.set_mesh(mesh):
        compiled = model_fixtures.jitted(
            model, model_fixtures.sections(**training), mesh, model_fixtures.optimization()
        )
        parameters = model_fixtures.parameters(model)
        parameters["embedding"][0] = np.nan
        state = compiled.begin(jax.device_put(parameters))
        metrics, states = [], []
        for step in range(steps):
            batch = model_fixtures.batch(seed=step)
            batch["tokens"] = np.maximum(batch["tokens"], 1)
            if step in at_steps:
                batch["tokens"][3, 0] = 0
            state, measured = compiled.train(state, put_batch(batch, mesh))
            metrics.append(jax.device_get(measured))
            states.append(jax.device_get(state))
        return metrics, states


def test_a_loss_that_is_not_finite_skips_the_update_and_is_counted():
    metrics, states = poisoned(model_fixtures.model(), at_steps=(1, 2, 4), dtype="bfloat16")
    assert [int(m["skipped"]) for m in metrics] == [0, 1, 2, 2, 3, 3]
    assert [int(m["skipped_in_a_row"]) for m in metrics] == [0, 1, 2, 0, 1, 0]
    assert [bool(np.isfinite(m["loss"])) for m in metrics] == [True, False, False, True, False, True]
    assert [int(s.step) for s in states] == [1, 2, 3, 4, 5, 6]
    for skipped, before in ((1, 0), (2, 1), (4, 3)):
        for kept in ("parameters", "working", "optimizer"):
            chex.assert_trees_all_equal(getattr(states[skipped], kept), getattr(states[before], kept))
    # The schedule counts updates, not batches.
    assert metrics[3]["learning_rate"] == pytest.approx(float(schedule(CosineScheduleConfig(decay_steps=100), 1e-2)(1)))


def test_a_state_begins_with_given_parameters_which_no_array_shares():
    sections, mesh = model_fixtures.sections(ema_decay=0.3), meshes.make()
    steps = TrainStep(model_fixtures.model(num_layers=1), *sections, model_fixtures.optimization()).jitted(mesh)
    with jax.set_mesh(mesh):
        initial = steps.init()
        begun = steps.begin(jax.tree.map(jnp.copy, initial.parameters))
    chex.assert_trees_all_equal(begun, initial)
    buffers = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(begun)]
    assert len(set(buffers)) == len(buffers)  # `train` donates each


def test_the_average_follows_the_parameters_and_a_skipped_step_leaves_it_alone():
    metrics, states = poisoned(model_fixtures.model(num_layers=2), at_steps=(1,), steps=4, ema_decay=0.3)
    chex.assert_trees_all_equal(states[1].average, states[0].average)
    average = model_fixtures.parameters(model_fixtures.model(num_layers=2))
    for updates, state in enumerate((states[0], states[2], states[3]), start=1):
        decay = min(0.3, (1 + updates) / (10 + updates))
        average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, state.parameters)
        chex.assert_trees_all_close(state.average, average, rtol=1e-5, atol=1e-7)


def test_without_an_average_nothing_of_it_is_in_the_state():
    steps = TrainStep(model_fixtures.model(), *model_fixtures.sections(), model_fixtures.optimization())
    state = jax.eval_shape(steps.init)
    assert state.average is None and not [path for path in tree.paths(state) if "average" in path]


@pytest.mark.parametrize("microbatches", sampled([1, 4], ["1"]))
def test_the_z_loss_is_added_to_the_objective_and_not_to_the_loss(microbatches):
    batch, coefficient = model_fixtures.batch(), 0.1
    model = model_fixtures.model(num_layers=2)
    settings = model_fixtures.optimization(clip_norm=1e9)
    sections = model_fixtures.sections(z_loss=coefficient, microbatches=microbatches)
    (metrics,), state = model_fixtures.run_steps(model, sections, [batch], optimization=settings)

    graph, _ = tree.abstract(model)
    seen = packed_causal_mask(batch["positions"])
    valid = batch["segments"] > 0

    def objective(parameters):
        module = nnx.merge(graph, parameters)
        logits = module.logits(module.hidden(batch["tokens"], batch["positions"], seen)[0])
        log_z = jax.nn.logsumexp(logits, axis=-1)
        loss = log_z - jnp.take_along_axis(logits, jnp.asarray(batch["targets"])[..., None], -1)[..., 0]
        loss, z_loss = ((jnp.where(valid, x, 0.0)).sum() / valid.sum() for x in (loss, coefficient * log_z**2))
        return loss + z_loss, (loss, z_loss)

    parameters = model_fixtures.parameters(model)
    gradients, (loss, z_loss) = jax.jit(jax.grad(objective, has_aux=True))(parameters)
    model_fixtures.assert_same_numbers([metrics["loss"], metrics["z_loss"]], [loss, z_loss], 1e-5)
    moments = jax.tree.map(lambda m: m / (1 - settings.beta1), state.optimizer[1][0].mu)
    model_fixtures.assert_same_numbers(moments, jax.device_get(gradients), 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes, microbatches", [pytest.param((1, 1, 1), 1, marks=pytest.mark.exhaustive), ((2, 2, 1), 4)]
)
def test_what_layers_return_is_in_the_objective_and_the_metrics(sizes, microbatches, monkeypatch):
    """Losses of layers are summed over them and added to the objective, statistics averaged."""
    call = DenseFeedForward.__call__

    def with_auxiliary(self, x_BTD, rows):
        y_BTD, _ = call(self, x_BTD, rows)
        size = jnp.mean(jnp.square(y_BTD))
        return y_BTD, Auxiliary({"activity": 3.0 * size}, {"size": size})

    monkeypatch.setattr(DenseFeedForward, "__call__", with_auxiliary)
    model, settings = model_fixtures.model(num_layers=2), model_fixtures.optimization(clip_norm=1e9)
    row = model_fixtures.batch(rows=1)
    batch = {name: np.repeat(x, 8, axis=0) for name, x in row.items()}  # every part of the batch has the same means
    mesh = meshes.make(*sizes)
    with jax.set_mesh(mesh):
        steps = TrainStep(model, *model_fixtures.sections(microbatches=microbatches), settings).jitted(mesh)
        state, metrics = steps.train(steps.init(), put_batch(batch, mesh))
    graph, _ = tree.abstract(model)
    valid = row["segments"] > 0

    def objective(parameters):
        module = nnx.merge(graph, parameters)
        hidden, _, auxiliary = module.hidden(row["tokens"], row["positions"], packed_causal_mask(row["positions"]))
        losses, _ = cross_entropy(module.logits(hidden), row["targets"])
        loss, size_L = jnp.where(valid, losses, 0.0).sum() / valid.sum(), auxiliary.statistics["size"]
        return loss + 3.0 * size_L.sum(), {"loss": loss, "activity": 3.0 * size_L.sum(), "size": size_L.mean()}

    gradients, wanted = jax.grad(objective, has_aux=True)(tree.init(model, 0, meshes.make()))
    model_fixtures.assert_same_numbers({name: metrics[name] for name in wanted}, wanted, 1e-5)
    moments = jax.tree.map(lambda m: m / (1 - settings.beta1), state.optimizer[1][0].mu)
    model_fixtures.assert_same_numbers(jax.device_get(moments), jax.device_get(gradients), 1e-4)


def test_a_loss_of_a_layer_does_not_replace_another(monkeypatch):
    call = DenseFeedForward.__call__

    def with_loss(self, x_BTD, rows):
        y_BTD, _ = call(self, x_BTD, rows)
        return y_BTD, Auxiliary({"loss": jnp.mean(y_BTD)})

    monkeypatch.setattr(DenseFeedForward, "__call__", with_loss)
    steps = TrainStep(model_fixtures.model(), *model_fixtures.sections(), model_fixtures.optimization())
    with pytest.raises(ValueError, match="are called loss"):
        jax.eval_shape(steps.train, jax.eval_shape(steps.init), model_fixtures.batch())


def test_the_z_loss_is_not_among_the_metrics_where_it_is_off():
    steps = TrainStep(model_fixtures.model(), *model_fixtures.sections(), model_fixtures.optimization())
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model_fixtures.batch())
    _, metrics = jax.eval_shape(steps.train, jax.eval_shape(steps.init), batch)
    assert "loss" in metrics and "z_loss" not in metrics


def test_the_logarithm_of_z_is_computed_once():
    """One exponential of logits forward, and the softmax backward."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model_fixtures.batch())

    def exponentials(z_loss):
        steps = TrainStep(
            model_fixtures.model(), *model_fixtures.sections(z_loss=z_loss), model_fixtures.optimization()
        )
        program = jax.jit(steps.train).lower(jax.eval_shape(steps.init), batch).as_text()
        return len(
            re.findall(rf"exponential .* tensor<8x{model_fixtures.CONTEXT}x{model_fixtures.VOCABULARY}xf32>", program)
        )

    assert exponentials(1e-4) == exponentials(0.0) > 0


def test_dropout_is_the_step_s_own_and_repeats(monkeypatch):
    def losses(dropout, seed=0):
        metrics, _ = model_fixtures.run_steps(
            model_fixtures.model(), model_fixtures.sections(dropout=dropout, seed=seed), [model_fixtures.batch()] * 3
        )
        return [float(m["loss"]) for m in metrics]

    first = losses(0.3)
    assert first != losses(0.0)
    monkeypatch.setattr(model_fixtures, "jitted", model_fixtures.jitted.__wrapped__)  # another trace
    assert first == losses(0.3)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32():
    exact, _ = model_fixtures.run_steps(model_fixtures.model(), model_fixtures.sections(), [model_fixtures.batch()] * 3)
    half, state = model_fixtures.run_steps(
        model_fixtures.model(), model_fixtures.sections(dtype="bfloat16"), [model_fixtures.batch()] * 3
    )
    chex.assert_trees_all_equal_dtypes(state.parameters, jax.tree.map(np.float32, state.parameters))
    chex.assert_trees_all_equal(state.working, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.parameters))
    losses = np.array([[m["loss"] for m in run] for run in (exact, half)])
    assert not np.array_equal(*losses)
    np.testing.assert_allclose(*losses, rtol=0.03)  # eight bits of mantissa through three layers


def test_a_resumed_state_has_the_working_copy_that_no_checkpoint_holds():
    mesh, model = meshes.make(1, 2, 2), model_fixtures.model(num_layers=1)
    sections = model_fixtures.sections(dtype="bfloat16")
    with jax.set_mesh(mesh):
        steps = model_fixtures.jitted(model, sections, mesh, model_fixtures.optimization())
        state, _ = steps.train(steps.begin(model_fixtures.placed(model, mesh)), put_batch(model_fixtures.batch(), mesh))
        kept = jax.device_get(state)
        resumed = steps.resume(state._replace(working=None))
        chex.assert_trees_all_equal(jax.device_get(resumed), kept)
        steps.train(resumed, put_batch(model_fixtures.batch(seed=1), mesh))  # whose arrays lie as a step's do


@pytest.mark.parametrize("family", sampled(["llama", "gpt2"], ["gpt2"]))
def test_gradients_in_bfloat16_are_those_of_float32_to_its_precision(family):
    """This holds for every parameter, even if one token of the batch is far more frequent than the others."""
    rows, length = 8, 240
    tokens = (
        np.random.default_rng(0).zipf(1.5, (rows, length + 1)).clip(max=model_fixtures.VOCABULARY).astype(np.int32) - 1
    )
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": np.ones((rows, length), np.int32)}
    batch["positions"] = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    model = model_fixtures.model(
        model_fixtures.FAMILIES[family], context_length=length, num_layers=1, initializer_std=0.02
    )
    # One step of it subtracts the gradient.
    descent = model_fixtures.optimization(
        kind="sgd", learning_rate=1.0, momentum=0.0, clip_norm=1e9, schedule={"kind": "constant"}
    )
    before = model_fixtures.parameters(model)

    def gradients(dtype):
        _, state = model_fixtures.run_steps(
            model, model_fixtures.sections(sequence=length, dtype=dtype), [batch], optimization=descent
        )
        return jax.tree.map(np.subtract, before, state.parameters)

    # Eight bits of mantissa, and their rounding in one layer.
    model_fixtures.assert_same_numbers(gradients("bfloat16"), gradients("float32"), relative=0.02)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_product_of_the_step_is_of_bfloat16(family):
    """Backward too: JAX's own transpose of a product with a float32 result multiplies in float32."""
    steps = TrainStep(
        model_fixtures.model(model_fixtures.FAMILIES[family]),
        *model_fixtures.sections(dtype="bfloat16"),
        model_fixtures.optimization(),
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model_fixtures.batch())
    program = jax.jit(steps.train).lower(jax.eval_shape(steps.init), batch).as_text()
    operands = re.findall(r"dot_general.* : \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)", program)
    assert len(operands) > 20 and set(operands) == {("bf16", "bf16")}


def test_one_trace_serves_every_step(monkeypatch):
    mesh = meshes.make()
    for name in ("train", "evaluate"):
        monkeypatch.setattr(TrainStep, name, chex.assert_max_traces(getattr(TrainStep, name), n=1))
    step = TrainStep(model_fixtures.model(), *model_fixtures.sections(), model_fixtures.optimization())
    with jax.set_mesh(mesh):
        compiled = step.jitted(mesh)
        state = compiled.begin(model_fixtures.placed(model_fixtures.model(), mesh))
        for step in range(3):
            batch = put_batch(model_fixtures.batch(seed=step), mesh)
            state, _ = compiled.train(state, batch)
            compiled.evaluate(state.parameters, batch)


def test_the_state_s_buffers_are_donated():
    mesh = meshes.make()
    with jax.set_mesh(mesh):
        compiled = model_fixtures.jitted(
            model_fixtures.model(), model_fixtures.sections(), mesh, model_fixtures.optimization()
        )
        state = compiled.begin(model_fixtures.placed(model_fixtures.model(), mesh))
        compiled.train(state, put_batch(model_fixtures.batch(), mesh))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_an_untrained_model_knows_nothing_and_training_learns():
    model = model_fixtures.model(initializer_std=0.002, num_layers=1)
    batches = [model_fixtures.batch()] * 60
    metrics, _ = model_fixtures.run_steps(model, model_fixtures.sections(), batches, initialised=True)
    np.testing.assert_allclose(metrics[0]["loss"], np.log(model_fixtures.VOCABULARY), atol=0.01)
    # Random targets carry ln 64 = 4.16 nats each; only memorisation gets below.
    assert metrics[-1]["loss"] < 2.0


@ELSEWHERE
@pytest.mark.parametrize("remat", sampled(["none", "full"], ["none"]))
@pytest.mark.parametrize("sizes", sampled([(2, 2, 1), (2, 1, 2)], ["(2, 2, 1)"]), ids=str)
def test_layers_written_out_compile_for_tpus_within_the_sum_over_replicas(sizes, remat):
    """XLA for TPUs aborts on a map over devices that is inside another, if a function that is called several times has
    it. So the maps of all layers are in the one body of the loop over microbatches."""
    model = model_fixtures.model(num_layers=2)
    changes = {"dtype": "bfloat16", "microbatches": 2, "remat": remat, "scan_layers": False}
    mesh = meshes.make(*sizes, devices=targets.devices(Target.parse("tpu-v5e:2x2")))
    lowered = step_programs(model_fixtures.experiment(model, **changes), "train", mesh).step.lower()
    text = lowered.as_text()
    functions = {re.search(r"@(\w+)", each)[1]: each for each in re.split(r"(?m)^  func\.func ", text)[1:]}
    have = [name for name, each in functions.items() if "sdy.manual_computation" in each]
    assert all(len(re.findall(rf"call @{name}\(", text)) <= 1 for name in have), have
    assert max(each.count("sdy.manual_computation") for each in functions.values()) > 5 * model.num_layers
    assert lowered.compile().as_text().count('custom_call_target="tpu_custom_call"') >= 5 * model.num_layers
