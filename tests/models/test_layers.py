"""Layers that differ: their stacks, the loop through them, and everything that walks over layers."""

import functools

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from matrices import sampled

from jaxlm.models import tree
from jaxlm.models.layers import Execution, Segment, segments
from jaxlm.models.positions import packed_causal_mask

# Three kinds of layer in a period of four, and a remainder of three: two structures, of which one has a window and
# angles of its own in some layers, and one has no positions.
MIXED = {
    **model_fixtures.LLAMA,
    "num_layers": 11,
    "pattern": (
        {"name": "wide", "feed_forward": {"d_ff": 24}, "attention": {"qk_norm": True}},
        {"name": "local", "attention": {"window": 3}, "position": {"theta": 100.0}},
        {"name": "still", "position": {"kind": "none"}},
        {"name": "narrow", "attention": {"window": 6}},
    ),
}
EXECUTIONS = [
    Execution("full", scan=True),
    Execution(("query", "up"), scan=True),
    Execution("none", scan=False),
    Execution("full", scan=False),
]


@pytest.fixture(scope="module")
def mixed():
    model = model_fixtures.model(MIXED)
    graph, _ = tree.abstract(model)
    return model, graph, tree.init(model, 0, meshes.make())


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
    assert shapes["layers/wide/feed_forward/up"] == (3, 32, 24)
    assert shapes["layers/local/feed_forward/up"] == (8, 32, 48)
    assert shapes["layers/wide/attention/query_norm/scale"] == (3, 4)
    assert {path.split("/")[1] for path in shapes} == {"wide", "local"}
    assert "layers/local/attention/query_norm/scale" not in shapes


def test_parameters_begin_as_each_block_says():
    """Blocks of one structure that begin otherwise: gains of 1, or of 1 + 0."""
    pattern = ({"name": "a"}, {"name": "b", "norm": {"plus_one": True}})
    model = model_fixtures.model(pattern=pattern)
    scale = tree.init(model, 0, meshes.make())["layers"]["attention_norm"]["scale"]
    np.testing.assert_array_equal(scale[:, 0], [1.0, 0.0, 1.0])


@functools.partial(jax.jit, static_argnums=(0, 3))
def loss_of(graph, parameters, tokens, execution):
    module = nnx.merge(graph, parameters)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def observe(x_BTD):
        return {"mean": jnp.mean(jnp.abs(x_BTD))}

    x_BTD, _, auxiliary = module.residual(
        tokens, positions, packed_causal_mask(positions), execution=execution, observe=observe
    )
    return jnp.mean(jnp.square(module.logits(module.final_norm(x_BTD)))), auxiliary.statistics["mean"]


@pytest.mark.parametrize("execution", sampled(EXECUTIONS, [str(EXECUTIONS[0]), str(EXECUTIONS[2])]), ids=str)
def test_execution_changes_nothing_in_mixed_layers(mixed, execution):
    _, graph, parameters = mixed
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (2, 12), dtype=np.int32)
    gradient = jax.value_and_grad(loss_of, argnums=1, has_aux=True)
    expected, found = (gradient(graph, parameters, tokens, each) for each in (Execution(), execution))
    model_fixtures.assert_same_numbers(found, expected, 1e-5)
    assert expected[0][1].shape == (11,)


def by_hand(model, parameters, tokens):
    """Return the logits of a model whose blocks are merged and run one by one, each as a model of its own."""
    kinds, at = {"wide": "wide"}, {"wide": 0, "local": 0}
    positions = jnp.arange(tokens.shape[1])[None]
    graph, _ = tree.abstract(model)
    module = nnx.merge(graph, parameters)
    x_BTD = parameters["embedding"][tokens]
    for name, block in zip(model.layer_names, model.layers, strict=True):
        stack = kinds.get(name, "local")
        one = model.of(block).model_copy(update={"num_layers": 1})
        layer = jax.tree.map(lambda x, i=at[stack]: x[i : i + 1], parameters["layers"][stack])
        at[stack] += 1
        alone = nnx.merge(tree.abstract(one)[0], {**parameters, "layers": layer})
        unit = jnp.eye(model_fixtures.VOCABULARY)  # the stream goes in and out of a model of one layer
        del unit
        x_BTD = alone_residual(alone, x_BTD, positions)
    return module.logits(module.final_norm(x_BTD))


def alone_residual(module, x_BTD, positions):
    """Return the stream after a model of one layer whose embedding is the stream."""
    T = x_BTD.shape[1]
    module.embedding.set_value(x_BTD[0])
    y_BTD, _, _ = module.residual(jnp.arange(T)[None], positions, packed_causal_mask(positions))
    return y_BTD


def test_each_layer_computes_what_its_block_says(mixed):
    """Layer by layer, as models of one kind of layer, which other tests hold against equations."""
    model, graph, parameters = mixed
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (1, 12), dtype=np.int32)
    expected = by_hand(model, parameters, tokens)
    model_fixtures.assert_same_numbers(model_fixtures.full_logits(graph, parameters, tokens[0]), expected[0], 1e-5)
