"""Optimizers against their papers in numpy, layer by layer, and the same on every mesh."""

import functools
import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.models import tree as model_tree
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.partition import replicated
from jaxlm.training import checkpoints
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.optimizer import optimizer, state_shardings
from jaxlm.training.step import TrainStep

MESHES = [(d, f, t) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * f * t == 8]
# Every sort of parameter: learned positions, biases, norms, an unembedding, matrices with heads on either side.
MODEL = model_fixtures.model({**model_fixtures.GPT2, "tied_embeddings": False}, num_layers=2)
# [inputs, outputs] of a layer's matrices: heads and head dim are one side.
SHAPES = {"query": (32, 32), "key": (32, 32), "value": (32, 32), "output": (32, 32), "up": (32, 64), "down": (64, 32)}
RATE, DECAY = 1e-2, 0.1


def abstract():
    return model_tree.abstract(MODEL)[1]


def draws(seed):
    """A tree like the model's parameters, of normal numbers."""
    draw = np.random.default_rng(seed)
    shapes = model_tree.shapes(abstract())
    return jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)


def settings(kind, **changes):
    """A constant rate, and no clipping."""
    common = {"learning_rate": RATE, "weight_decay": DECAY, "clip_norm": 1e9, "schedule": {"kind": "constant"}}
    return model_fixtures.optimization(kind=kind, **{**common, **changes})


@functools.cache
def descend(chosen, updates=3):
    """{path: parameter} after some updates with random gradients."""
    transform = optimizer(chosen, abstract())

    @jax.jit
    def update(gradients, state, parameters):
        directions, state = transform.update(gradients, state, parameters)
        return jax.tree.map(jnp.add, parameters, directions), state

    parameters = draws(0)
    state = jax.jit(transform.init)(parameters)
    for step in range(updates):
        parameters, state = update(draws(step + 1), state, parameters)
    return model_tree.paths(jax.device_get(parameters))


def matrix_shape(path):
    return {"embedding": (64, 32), "positions": (32, 32), "unembedding": (32, 64), **SHAPES}.get(path.split("/")[-1])


def by_hand(direction, updates=3, decay=DECAY, rate=RATE):
    """Return {path: parameter}, updated layer by layer as [inputs, outputs] or [n], by the directions of a generator
    that is made with (path, parameter) and receives gradients."""

    def one(path, shape, parameter, gradients):
        p = parameter.astype(np.float64).reshape(shape)
        state: dict = {}
        for t, gradient in enumerate(gradients, start=1):
            u = direction(path, t, gradient.astype(np.float64).reshape(shape), p, state)
            p = p - rate * (u + (decay * p if len(shape) == 2 else 0.0))
        return p.reshape(parameter.shape)

    start, gradients = model_tree.paths(draws(0)), [model_tree.paths(draws(t + 1)) for t in range(updates)]
    moved = {}
    for path, parameter in start.items():
        given = [g[path] for g in gradients]
        if path.startswith("layers/"):
            shape = matrix_shape(path) or (parameter[0].size,)
            layers = zip(parameter, *given, strict=True)
            moved[path] = np.stack([one(path, shape, layer[0], layer[1:]) for layer in layers])
        else:
            moved[path] = one(path, matrix_shape(path) or (parameter.size,), parameter, given)
    return moved


def adam(path, t, g, p, state, beta1=0.9, beta2=0.95, epsilon=1e-8):
    """Loshchilov and Hutter 2019, algorithm 2, lines 6 to 12."""
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
    return state["m"] / (1 - beta1**t) / (np.sqrt(state["v"] / (1 - beta2**t)) + epsilon)


def newton_schulz(x, iterations=5):
    """Jordan et al. 2024: five times a·X + b·XXᵀX + c·(XXᵀ)²X."""
    x = x / np.linalg.norm(x)
    for _ in range(iterations):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def muon(path, t, g, p, state, momentum=0.95):
    """Jordan et al. 2024 with Liu et al. 2025, equation 4."""
    if path.split("/")[-1] not in SHAPES:
        return adam(path, t, g, p, state)
    m = state["m"] = momentum * state.get("m", 0.0) + g
    return newton_schulz(g + momentum * m) * 0.2 * math.sqrt(max(g.shape))


def adafactor(path, t, g, p, state):
    """Shazeer and Stern 2018, algorithms 4 and 5."""
    decay = 1 - t**-0.8
    square = g**2 + 1e-30
    if g.ndim == 2:
        state["r"] = decay * state.get("r", 0.0) + (1 - decay) * square.sum(1)
        state["c"] = decay * state.get("c", 0.0) + (1 - decay) * square.sum(0)
        second = np.outer(state["r"], state["c"]) / state["r"].sum()
    else:
        second = state["v"] = decay * state.get("v", 0.0) + (1 - decay) * square
    u = g / np.sqrt(second)
    u = u / max(1.0, np.sqrt(np.mean(u**2)))
    return u * max(1e-3, np.sqrt(np.mean(p**2)))


def lion(path, t, g, p, state, beta1=0.9, beta2=0.99):
    """Chen et al. 2023, algorithm 2."""
    m = state.get("m", 0.0)
    state["m"] = beta2 * m + (1 - beta2) * g
    return np.sign(beta1 * m + (1 - beta1) * g)


def sgd(path, t, g, p, state, momentum=0.9):
    state["m"] = momentum * state.get("m", 0.0) + g
    return state["m"]


def nesterov(path, t, g, p, state, momentum=0.9):
    return g + momentum * sgd(path, t, g, p, state, momentum)


REFERENCES = {
    "adamw": (adam, {}),
    "muon": (muon, {}),
    "adafactor": (adafactor, {}),
    "lion": (lion, {}),
    "sgd": (sgd, {}),
    "nesterov": (nesterov, {"kind": "sgd", "nesterov": True}),
}


def test_every_kind_has_its_paper_here():
    assert REFERENCES.keys() >= set(model_fixtures.OPTIMIZERS)


@pytest.mark.parametrize("name", REFERENCES)
def test_three_updates_are_the_paper_s(name):
    reference, changes = REFERENCES[name]
    moved = descend(settings(**{"kind": name, **changes}))
    for path, expected in by_hand(reference).items():
        np.testing.assert_allclose(moved[path], expected, rtol=1e-4, atol=2e-5, err_msg=path)


def test_every_matrix_of_the_layers_is_orthogonalised_and_nothing_else():
    transform = optimizer(settings("muon"), abstract())
    state = jax.eval_shape(transform.init, model_tree.shapes(abstract()))
    states = state[1][0].inner_states
    assert {path.split("/")[-1] for path in model_tree.paths(states["muon"].inner_state[0].trace)} == set(SHAPES)
    both = model_tree.paths(states["muon"].inner_state[0].trace) | model_tree.paths(states["adam"].inner_state.mu)
    assert both.keys() == model_tree.paths(model_tree.shapes(abstract())).keys()


def test_the_singular_values_of_muon_s_updates_are_about_one():
    before, gradients = model_tree.paths(draws(0)), model_tree.paths(draws(1))
    after = descend(settings("muon", weight_decay=0.0), updates=1)
    matrices = [path for path in before if path.split("/")[-1] in SHAPES]
    for path, layer in itertools.product(matrices, range(2)):
        left, of_gradient, right = np.linalg.svd(
            gradients[path][layer].reshape(matrix_shape(path)), full_matrices=False
        )
        moved = (before[path][layer] - after[path][layer]).reshape(matrix_shape(path)) / RATE
        values = np.einsum("ri,rc,ic->i", left, moved, right) / (0.2 * math.sqrt(max(moved.shape)))
        # Five iterations multiply what is tiny by 485, and with Jordan's coefficients end between 0.68 and 1.13.
        values = values[of_gradient > 0.01 * np.linalg.norm(of_gradient)]
        assert len(values) > 28 and 0.65 < values.min() and values.max() < 1.2, (path, values)


def test_muon_s_updates_are_as_large_as_adam_s():
    before, after = model_tree.paths(draws(0)), descend(settings("muon", weight_decay=0.0), updates=1)
    for path in before:
        if shape := SHAPES.get(path.split("/")[-1]):
            rms = np.sqrt(np.mean((before[path] - after[path]) ** 2)) / RATE
            # An orthogonal [m, n] has min(m, n) squares of 1 among m·n numbers, so that only 0.2 is left.
            np.testing.assert_allclose(rms, 0.2, rtol=0.2, err_msg=f"{path} {shape}")


def test_adam_within_muon_has_its_own_learning_rate():
    before = model_tree.paths(draws(0))
    one, ten = (
        descend(settings("muon", adam_learning_rate=rate, weight_decay=0.0), updates=1) for rate in (RATE, 10 * RATE)
    )
    for path, p in before.items():
        factor = 1.0 if path.split("/")[-1] in SHAPES else 10.0
        np.testing.assert_allclose(ten[path] - p, factor * (one[path] - p), rtol=1e-3, atol=1e-5, err_msg=path)


def test_adafactor_keeps_a_row_and_a_column_per_matrix():
    transform = optimizer(settings("adafactor"), abstract())
    second = jax.eval_shape(transform.init, model_tree.shapes(abstract()))[1][0].second
    shapes = {path: leaf.shape for path, leaf in model_tree.paths(second).items()}
    assert shapes["layers/attention/query/inputs"] == (2, 32) and shapes["layers/attention/query/outputs"] == (2, 8, 4)
    assert shapes["layers/attention/output/inputs"] == (2, 8, 4) and shapes["layers/feed_forward/up_bias"] == (2, 64)


# Sharding, checkpoints


def test_the_state_of_adamw_keeps_the_paths_that_its_checkpoints_have():
    transform = optimizer(model_fixtures.optimization(), abstract())
    state = jax.eval_shape(transform.init, model_tree.shapes(abstract()))
    paths = model_tree.paths(model_tree.shapes(abstract()))
    moments = {f"1/0/{moment}/{path}" for moment in ("mu", "nu") for path in paths}
    assert model_tree.paths(state).keys() == {"1/0/count", "1/2/count", *moments}
    assert [type(part).__name__ for part in state[1]] == ["ScaleByAdamState", "MaskedState", "ScaleByScheduleState"]


@pytest.mark.parametrize("kind", model_fixtures.OPTIMIZERS)
def test_optimizer_state_lies_as_its_parameters_do(kind):
    mesh = meshes.make(data=2, fsdp=2, tensor=2)
    transform = optimizer(model_fixtures.optimization(kind=kind), abstract())
    lies = model_tree.paths(state_shardings(transform, abstract(), mesh))
    placed = model_tree.paths(model_tree.shardings(abstract(), mesh))
    for path, sharded in lies.items():
        names = [name for name in placed if f"/{path}".endswith(f"/{name}")]
        if names:
            assert sharded == placed[max(names, key=len)], path
        elif path.endswith("query/inputs"):
            assert sharded.spec == P(None, "fsdp")
        elif path.endswith("query/outputs"):
            assert sharded.spec == P(None, "tensor", None)
        elif not path.endswith(("inputs", "outputs")):
            assert path.endswith("count") and sharded == replicated(mesh)


def updated_on(mesh, kinds):
    """Parameters after two updates of several optimizers with the same gradients; one program for all of them."""
    tree = abstract()
    transforms = {kind: optimizer(settings(kind, clip_norm=10.0), tree) for kind in kinds}
    lies = {kind: state_shardings(transform, tree, mesh) for kind, transform in transforms.items()}
    placed = model_tree.shardings(tree, mesh)

    def update(gradients, states, parameters):
        moved = {}
        for kind, transform in transforms.items():
            directions, states[kind] = transform.update(gradients, states[kind], parameters[kind])
            moved[kind] = jax.tree.map(jnp.add, parameters[kind], directions)
        return moved, states

    parameters = {kind: jax.device_put(draws(0), placed) for kind in transforms}
    with jax.set_mesh(mesh):
        step = jax.jit(update, out_shardings=(dict.fromkeys(transforms, placed), lies))
        init = jax.jit(lambda p: {k: t.init(p[k]) for k, t in transforms.items()}, out_shardings=lies)
        states = init(parameters)
        for seed in (1, 2):
            parameters, states = step(jax.device_put(draws(seed), placed), states, parameters)
    return jax.device_get(parameters)


@functools.cache
def updated_on_one_device(kinds):
    return updated_on(meshes.make(), kinds)


# What takes more of a matrix than each number by itself; the rest is a gradient by itself and the norm of all.
OF_MATRICES = "adafactor", "muon"


@pytest.mark.parametrize(
    "mesh, kinds",
    sampled(
        [pytest.param((2, 2, 2), OF_MATRICES, id="of matrices")]
        + [pytest.param(mesh, model_fixtures.OPTIMIZERS, id=str(mesh)) for mesh in MESHES],
        ["of matrices"],
    ),
)
def test_updates_are_those_of_one_device(mesh, kinds):
    updated = updated_on(meshes.make(*mesh), kinds)
    before = draws(0)
    for kind in kinds:
        moved, expected = (jax.tree.map(np.subtract, p[kind], before) for p in (updated, updated_on_one_device(kinds)))
        model_fixtures.assert_same_numbers(moved, expected, 1e-4)


@pytest.mark.parametrize("mesh", sampled([(1, 8, 1), (2, 2, 2)], ["(2, 2, 2)"]), ids=str)
def test_muon_s_matrices_are_exchanged_once_each_way_and_never_replicated(mesh, capfd):
    tree, mesh = abstract(), meshes.make(*mesh)
    transform = optimizer(settings("muon"), tree)
    placed, lies = model_tree.shardings(tree, mesh), state_shardings(transform, tree, mesh)
    parameters = model_tree.placed(model_tree.shapes(tree), placed)
    state = model_tree.placed(jax.eval_shape(transform.init, parameters), lies)
    with jax.set_mesh(mesh):
        update = jax.jit(transform.update, out_shardings=(placed, lies))
        program = update.lower(parameters, state, parameters).compile().as_text()
    assert "rematerialization" not in capfd.readouterr().err
    assert 0 < program.count(" all-to-all(") <= 2 * len(SHAPES) * sum(mesh.shape[a] > 1 for a in ("fsdp", "tensor"))
    # Two layers, padded to eight: over the data axis at most two whole matrices return, and nothing else.
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", program)
    assert len(gathered) <= len(SHAPES) * (mesh.shape["data"] > 1)
    assert all(math.prod(map(int, shape.split(","))) <= 2 * 32 * 64 for shape in gathered)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", model_fixtures.OPTIMIZERS)
def test_a_run_resumed_from_a_checkpoint_is_the_run_straight_through(kind, tmp_path):
    mesh = meshes.make(2, 2, 2)
    sections = model_fixtures.sections(ema_decay=0.9, z_loss=1e-3)
    steps = TrainStep(model_fixtures.model(num_layers=2), *sections, model_fixtures.optimization(kind=kind))
    with jax.set_mesh(mesh):
        compiled = steps.jitted(mesh)

        def go_on(state, seeds):
            for seed in seeds:
                state, _ = compiled.train(state, put_batch(model_fixtures.batch(seed=seed), mesh))
            return state

        state = go_on(compiled.init(), (0, 1))
        with Checkpoints(tmp_path, 2) as saved:
            saved.save(state, None)
        straight = jax.device_get(go_on(state, (2, 3)))
        like = model_tree.placed(jax.eval_shape(steps.init), steps.shardings(mesh))
        resumed = jax.device_get(go_on(checkpoints.restore_state(tmp_path, 2, like), (2, 3)))
    chex.assert_trees_all_equal(resumed, straight)


@pytest.mark.exhaustive  # AdamW learns in test_step.py, and the others' updates are their papers' above
@pytest.mark.parametrize("kind", model_fixtures.OPTIMIZERS)
def test_every_optimizer_learns(kind):
    rate = {"adafactor": 3e-2, "lion": 1e-3, "sgd": 0.3}.get(kind, 1e-2)
    chosen = model_fixtures.optimization(
        kind=kind, learning_rate=rate, schedule={"kind": "constant", "warmup_steps": 5}
    )
    metrics, _ = model_fixtures.run_steps(
        model_fixtures.model(initializer_std=0.05, num_layers=2),
        model_fixtures.sections(),
        [model_fixtures.batch()] * 60,
        optimization=chosen,
    )
    assert metrics[-1]["loss"] < 3.5 < 4.1 < metrics[0]["loss"]


# Groups


def test_the_first_group_that_matches_decides():
    groups = [
        {"pattern": "layers/*/query", "learning_rate_scale": 0.0},
        {"pattern": "layers/attention/*", "learning_rate_scale": 0.5},
        {"pattern": "*norm/scale", "weight_decay": 0.7},
    ]
    start, plain, grouped = (
        model_tree.paths(draws(0)),
        descend(settings("sgd")),
        descend(settings("sgd", groups=groups)),
    )
    matched = {name: 0 for name in ("frozen", "half", "decayed")}
    for path, p in start.items():
        match path.split("/"):
            case ["layers", "attention", "query"]:
                matched["frozen"] += 1
                np.testing.assert_array_equal(grouped[path], p)
            case ["layers", "attention", _]:
                matched["half"] += 1
                half = descend_one(p, path, rate=RATE / 2)
                np.testing.assert_allclose(grouped[path], half, rtol=1e-4, atol=1e-5, err_msg=path)
            case [*_, norm, "scale"] if norm.endswith("norm"):
                matched["decayed"] += 1
                decayed = descend_one(p, path, decay=0.7)
                np.testing.assert_allclose(grouped[path], decayed, rtol=1e-4, atol=1e-5, err_msg=path)
            case _:
                np.testing.assert_array_equal(grouped[path], plain[path])
    assert matched == {"frozen": 1, "half": 7, "decayed": 3}


def descend_one(p, path, rate=RATE, decay=None):
    """One parameter by gradient descent with momentum 0.9, in float64."""
    decay = (DECAY if matrix_shape(path) else 0.0) if decay is None else decay
    p, m = p.astype(np.float64), 0.0
    for t in range(3):
        m = 0.9 * m + model_tree.paths(draws(t + 1))[path]
        p = p - rate * (m + decay * p)
    return p


def test_gradients_of_frozen_parameters_do_not_count():
    groups = [{"pattern": "*", "learning_rate_scale": 0.0}]
    model = model_fixtures.model(num_layers=2)
    (metrics,), state = model_fixtures.run_steps(
        model,
        model_fixtures.sections(),
        [model_fixtures.batch()],
        optimization=model_fixtures.optimization(groups=groups),
    )
    assert metrics["grad_norm"] == 0.0
    chex.assert_trees_all_equal(state.parameters, model_fixtures.parameters(model))


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["embeding"], ["optimizer.groups[0].pattern = 'embeding' matches no parameter", "embedding"]),
        (["embedding", "layers/norm/scale"], ["optimizer.groups[1].pattern", "layers/attention_norm/scale"]),
        (["zzzz"], ["matches no parameter; there are "]),
        (["Embedding"], ["matches no parameter", "embedding"]),
        (["layers/*", "*/query"], ["optimizer.groups[1].pattern = '*/query' comes too late", "layers/attention/query"]),
    ],
    ids=str,
)
def test_a_pattern_that_decides_nothing_is_refused_in_one_line(patterns, says):
    chosen = model_fixtures.optimization(groups=[{"pattern": pattern} for pattern in patterns])
    with pytest.raises(InputError) as refused:
        TrainStep(MODEL, *model_fixtures.sections(), chosen)
    said = str(refused.value)
    assert "\n" not in said and not [part for part in says if part not in said], said
