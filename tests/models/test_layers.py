"""Layers that differ: their stacks, the loop through them, and everything that walks over layers."""

import collections
from functools import partial

import chex
import engine_jaxprs
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from matrices import sampled
from workload_fixtures import sections_of, workload

from jaxlm.costs.counted import recorder
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.counted.recorder import constants_and_carried
from jaxlm.costs.jaxpr.count import count
from jaxlm.models import tree
from jaxlm.models.cache import OwnTokens
from jaxlm.models.doors import Dropout
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.models.layers import Segment, segments
from jaxlm.models.positions import LayerRows, packed_causal_mask, rope_table, sliding_window_mask
from jaxlm.models.rows import Auxiliary, RowContext
from jaxlm.models.transformer import Block
from jaxlm.parallel.batches import put_batch
from jaxlm.training.checkpoints import Checkpoints, restore_state
from jaxlm.training.groups import rules
from jaxlm.training.optimizer import optimizer
from jaxlm.training.step import TrainStep

EXECUTIONS = [
    ExecutionConfig(remat="full", scan_layers=True),
    ExecutionConfig(remat=("query", "up"), scan_layers=True),
    ExecutionConfig(remat="none", scan_layers=False),
    ExecutionConfig(remat="full", scan_layers=False),
]


@pytest.fixture(scope="module")
def mixed():
    model = model_fixtures.model(model_fixtures.MIXED)
    graph, _ = tree.abstract(model)
    return model, graph, model_fixtures.parameters(model)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("aaaa", [(0, 1, 4)]),
        ("a", [(0, 1, 1)]),
        ("ababab", [(0, 2, 3)]),
        ("lllllglllllgll", [(0, 6, 2), (12, 1, 2)]),
        ("dddmmmmm", [(0, 1, 3), (3, 1, 5)]),
        ("dabababa", [(0, 1, 1), (1, 2, 3), (7, 1, 1)]),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("", []),
    ],
)
def test_layers_are_divided_by_the_shortest_period_that_repeats(keys, found):
    assert segments(keys) == [Segment(*each) for each in found]


def test_equal_structures_share_a_stack_in_layer_order(mixed):
    _, _, parameters = mixed
    shapes = {path: x.shape for path, x in tree.paths(parameters).items() if path.startswith("layers/")}
    assert shapes["layers/small/feed_forward/up"] == (3, 32, 24)
    assert shapes["layers/local/feed_forward/up"] == (5, 32, 48)
    assert shapes["layers/small/attention/query_norm/scale"] == (3, 4)
    assert {path.split("/")[1] for path in shapes} == {"small", "local"}
    assert "layers/local/attention/query_norm/scale" not in shapes


def test_parameters_begin_as_each_block_says():
    """Blocks of one structure that begin otherwise: gains of 1, or of 1 + 0."""
    pattern = ({"name": "a"}, {"name": "b", "norm": {"plus_one": True}})
    model = model_fixtures.model(pattern=pattern)
    # Compiled to the gains alone.
    scale = jax.jit(lambda: tree.parameters(tree.build(model, 0))["layers"]["attention_norm"]["scale"])()
    np.testing.assert_array_equal(scale[:, 0], [1.0, 0.0, 1.0])


@partial(jax.jit, static_argnums=(0, 3))
def loss_of(graph, parameters, tokens, execution):
    module = nnx.merge(graph, parameters)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def observe(x_BTD):
        return {"mean": jnp.mean(jnp.abs(x_BTD))}

    x_BTD, _, auxiliary = module.residual(
        tokens, positions, packed_causal_mask(positions), execution=execution, observe=observe
    )
    return jnp.mean(jnp.square(module.logits(module.final_norm(x_BTD)))), auxiliary.statistics["mean"]


@pytest.mark.parametrize(
    "keys, execution",
    sampled(
        [pytest.param(keys, execution) for keys in ("ababa", "abcabcab") for execution in EXECUTIONS],
        [f"ababa-{EXECUTIONS[0]}"],
    ),
    ids=str,
)
def test_execution_changes_nothing_in_mixed_layers(keys, execution):
    """In loops over two or three kinds of layer, and in layers that stand alone behind them."""
    kinds = model_fixtures.MIXED["pattern"][: len({*keys})]
    model = model_fixtures.model({**model_fixtures.MIXED, "num_layers": len(keys), "pattern": kinds})
    graph, parameters = tree.abstract(model)[0], model_fixtures.parameters(model)
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (2, 12), dtype=np.int32)
    gradient = jax.jit(jax.value_and_grad(loss_of, argnums=1, has_aux=True), static_argnums=(0, 3))
    expected, found = (gradient(graph, parameters, tokens, each) for each in (ExecutionConfig(), execution))
    model_fixtures.assert_same_numbers(found, expected, 1e-5)
    assert expected[0][1].shape == (len(keys),)


def test_each_layer_computes_what_its_block_says(mixed):
    """Block by block, with the mask and the angles of each."""
    model, graph, parameters = mixed
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (1, 12), dtype=np.int32)
    positions = jnp.arange(12)[None]

    @partial(jax.jit, static_argnums=0)  # once for each kind
    def computed(block, parameters, x_BTD):
        seen = sliding_window_mask(block.window or 99, packed_causal_mask(positions))
        angles = None if block.position.kind == "none" else rope_table(block.position, 4, positions)
        one = nnx.eval_shape(lambda: Block(model.of(block), nnx.Rngs(0)))
        return nnx.merge(nnx.graphdef(one), parameters)(
            x_BTD, RowContext(positions, seen, angles, Dropout()), OwnTokens()
        )[0]

    x_BTD, at = parameters["embedding"][tokens], {"small": 0, "local": 0}
    for name, block in zip(model.layer_names, model.layers, strict=True):
        stack = "small" if name == "small" else "local"
        layer = jax.tree.map(lambda x, i=at[stack]: x[i], parameters["layers"][stack])  # arrays of NumPy
        at[stack] += 1
        x_BTD = computed(block, layer, x_BTD)

    @jax.jit
    def logits(parameters, x_BTD):
        module = nnx.merge(graph, parameters)
        return module.logits(module.final_norm(x_BTD))

    expected = logits(parameters, x_BTD)
    model_fixtures.assert_same_numbers(model_fixtures.full_logits(graph, parameters, tokens[0]), expected[0], 1e-5)


def equations(jaxpr):
    """Yield the equations of a jaxpr and of all jaxprs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from equations(inner)


def reads_floats_in_turn(scan):
    in_turn = scan.invars[sum(constants_and_carried(scan.params)) :]
    return any(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in in_turn)


def test_layers_that_differ_in_windows_and_angles_train_in_one_loop():
    """An engine runs each by itself: its loops read no parameters in turn, as they are over pages."""
    model = model_fixtures.model(model_fixtures.GEMMA)
    graph, shapes = tree.abstract(model)[0], tree.shapes(tree.abstract(model)[1])
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    train = jax.make_jaxpr(lambda p, t: loss_of(graph, p, t, ExecutionConfig()))(shapes, tokens)
    engine = engine_jaxprs.decoding(model).jaxpr
    loops = [[e for e in equations(x) if e.primitive.name == "scan"] for x in (train.jaxpr, engine)]
    over_parameters = [[e.params["length"] for e in each if reads_floats_in_turn(e)] for each in loops]
    assert over_parameters == [[3], []]


@pytest.mark.parametrize(("scan", "bodies", "barriers"), [(True, 5, 2), (False, 8, 8)])
def test_each_layer_is_rematerialised_by_itself(mixed, scan, bodies, barriers):
    """Three in the body of a loop, and two that stand alone, where XLA would merge what runs again with what ran; or
    all eight alone."""
    _, graph, parameters = mixed
    tokens = jnp.zeros((1, 8), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda p, t: loss_of(graph, p, t, ExecutionConfig(remat="full", scan_layers=scan)))(
        parameters, tokens
    )
    found = [eqn.params["prevent_cse"] for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "remat2"]
    assert (len(found), sum(found)) == (bodies, barriers)


def test_inference_copies_no_parameters(mixed):
    """Each layer's parameters are arguments of their own; a layer of a stack would be copied from it in every step."""
    model, _, _ = mixed
    traced = engine_jaxprs.decoding(model)
    stacked = {x.shape for path, x in tree.paths(tree.shapes(tree.abstract(model)[1])).items() if "layers/" in path}
    used = {eqn.primitive.name for eqn in equations(traced.jaxpr) for x in eqn.invars if x.aval.shape in stacked}
    assert not used & {"dynamic_slice", "slice", "gather"}


def test_auxiliary_results_come_in_layer_order(mixed, monkeypatch):
    """By name, of the layers that have one: a loss of the layers with norms of their heads, and all indices."""
    model, graph, parameters = mixed

    def call(self, x_BTD, rows, cache):
        returned = Auxiliary({"norms": jnp.float32(1)} if self.attention.settings.qk_norm != "none" else {})
        return x_BTD, cache, returned

    monkeypatch.setattr(Block, "__call__", call)
    module, tokens = nnx.merge(graph, parameters), jnp.zeros((1, 4), jnp.int32)
    places = []
    monkeypatch.setattr(LayerRows, "of", lambda self, at: places.append(at))

    def observe(x_BTD):
        return {"layer": places[-1].layer}

    found = jax.jit(lambda: module.residual(tokens, tokens, packed_causal_mask(tokens), observe=observe)[2])()
    np.testing.assert_array_equal(found.statistics["layer"], range(model.num_layers))
    assert found.losses["norms"].shape == (3,)


@pytest.mark.parametrize("kind", ["train", "decode"])
def test_recordings_know_the_window_of_every_layer(mixed, kind):
    model, _, _ = mixed
    recording = recorder.record(model, 16, False) if kind == "train" else recorder.record_engine(model, 32)
    windows = collections.Counter()
    for use in recording.uses:
        if use.name == ("attention" if kind == "train" else "paged_attention"):
            windows[use.options["window"]] += use.times
    assert windows == {None: 3 + 2, 3: 3}


def test_operations_bear_the_paths_of_their_parameters(mixed):
    found = recorder.record(mixed[0], 16, False)
    linear = [use for use in found.uses if use.name == "linear"]
    assert {use.scope for use in linear} == {found.parameters[use.operands[1]] for use in linear}
    assert "layers/small/attention/query" in {use.scope for use in linear}


@pytest.mark.parametrize(
    "remat", sampled(["none", "full", ("query", "up")], ["full"]), ids=lambda value: "-".join([*value])
)
def test_the_products_of_mixed_layers_are_counted(mixed, remat):
    model, _, _ = mixed
    work = workload("train", model, 8, model_fixtures.CONTEXT, remat=remat, kernels="xla")
    steps = TrainStep(model, *sections_of(work), work.optimizer)
    shape = jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), shape)
    assert flops(work).executed == count(steps.train, jax.eval_shape(steps.init), batch).matmul_flops


@pytest.mark.parametrize("kind", sampled(["muon", "adafactor", "adamw"], ["muon"]))
def test_each_layer_of_a_stack_is_updated_as_if_alone(mixed, kind):
    """Its matrices are those of one layer, whichever stack it is in, and gains do not decay."""
    model, _, parameters = mixed
    _, abstract = tree.abstract(model)
    settings = model_fixtures.optimization(kind=kind, clip_norm=1e9, weight_decay=0.1)
    transform = optimizer(settings, abstract)

    @jax.jit
    def update(gradients):
        return tree.paths(transform.update(gradients, transform.init(parameters), parameters)[0])

    draw = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: draw.standard_normal(x.shape, np.float32), parameters)
    others = jax.tree.map(lambda x: np.concatenate([x[:1], 3.0 * x[1:]]), gradients)
    before, after = map(jax.device_get, (update(gradients), update(others)))
    for path in ("layers/small/feed_forward/up", "layers/local/attention/output", "layers/local/attention_norm/scale"):
        np.testing.assert_allclose(before[path][0], after[path][0], rtol=1e-5, atol=1e-7)
    ruled = tree.paths(rules(settings, abstract))
    assert {path for path, rule in ruled.items() if not rule.weight_decay} == {
        path for path in ruled if path.endswith("scale")
    }
    assert all(d.stack == (0,) for path, d in tree.paths(tree.dimensions(abstract)).items() if "layers/" in path)


@pytest.mark.exhaustive
def test_losses_and_gradients_do_not_depend_on_the_mesh(mixed):
    expected, found = (model_fixtures.first_gradients(mixed[0], meshes.make(*mesh)) for mesh in ((), (2, 2, 2)))
    model_fixtures.assert_same_numbers(found[0], expected[0], 1e-5)
    model_fixtures.assert_same_numbers(found[1], expected[1], 1e-4)


@pytest.mark.exhaustive
def test_a_run_of_mixed_layers_resumes_to_the_last_bit(mixed, tmp_path):
    model, _, _ = mixed
    mesh, settings = meshes.make(), (model_fixtures.sections(), model_fixtures.optimization())
    with jax.set_mesh(mesh):
        steps = model_fixtures.jitted(model, settings[0], mesh, settings[1])
        state, _ = steps.train(steps.init(), put_batch(model_fixtures.batch(seed=0), mesh))
        with Checkpoints(tmp_path, 1) as saved:
            saved.save(state, None)
        like = tree.placed(jax.eval_shape(steps.init), TrainStep(model, *settings).shardings(mesh))
        restored = restore_state(tmp_path, 1, like)
        chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))
        after = [steps.train(each, put_batch(model_fixtures.batch(seed=1), mesh)) for each in (restored, state)]
    chex.assert_trees_all_equal(*jax.device_get(after))


def test_norms_are_those_of_each_layer(mixed):
    model, _, _ = mixed
    steps = TrainStep(model, *model_fixtures.sections(), model_fixtures.optimization())
    norms = jax.eval_shape(steps.norms, jax.eval_shape(steps.init), model_fixtures.batch())
    assert norms["residual"].shape == (8,)
    assert norms["gradient"]["layers/small/feed_forward/up"].shape == (3,)
    assert norms["gradient"]["layers/local/feed_forward/up"].shape == (5,)
