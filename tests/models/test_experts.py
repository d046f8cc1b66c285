"""Mixtures of experts: against every expert computed for every token, and what they must not depend on."""

import functools

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx
from markers import ELSEWHERE
from matrices import sampled
from pydantic import ValidationError
from workload_fixtures import workload

from jaxlm.core.errors import InputError
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import parameter_counts
from jaxlm.lowering import collectives, hlo, report, targets
from jaxlm.lowering.programs import step_programs
from jaxlm.models import config, tree
from jaxlm.models.doors import Dropout
from jaxlm.models.feed_forward.dense import DenseFeedForward
from jaxlm.models.feed_forward.mixture import MixtureFeedForward
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.masks import OneDocumentMask
from jaxlm.models.positions import packed_causal_mask
from jaxlm.models.rows import RowContext
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.mesh import make_mesh
from jaxlm.training import checkpoints
from jaxlm.training.optimizer import optimizer

B, T, D, E, K = 2, 9, 32, 8, 3
MIXTURE = {"kind": "mixture", "num_experts": E, "experts_per_token": K, "d_ff": 24}

# What each changes of a plain mixture.
VARIANTS = {
    "plain": {},
    "ungated": {"gated": False, "activation": "relu_squared"},
    "biases": {"bias": True, "router": {"bias": True}},
    "gpt_oss": {
        "bias": True,
        "clamp": 0.9,
        "gate_slope": 1.702,
        "up_offset": 1.0,
        "router": {"scores": "softmax_of_chosen", "bias": True},
    },
    "deepseek_v2": {
        "router": {"normalise": False, "scale": 16.0, "groups": {"count": 4, "kept": 2, "score": "max"}},
        "shared": {"d_ff": 40},
    },
    "deepseek_v3": {
        "router": {
            "scores": "sigmoid",
            "epsilon": 1e-20,
            "scale": 2.5,
            "groups": {"count": 4, "kept": 2, "score": "top2_sum"},
        },
        "shared": {"d_ff": 16},
    },
    "selection bias": {
        "router": {
            "scores": "sigmoid",
            "selection_bias": True,
            "groups": {"count": 4, "kept": 2, "score": "top2_sum"},
        }
    },
    "gated shared": {"shared": {"d_ff": 16, "gate": "sigmoid"}},
    "latent": {"latent_dim": 12, "bias": True},
    "whole microbatch": {"balance": {"over": "microbatch", "auxiliary_loss": 0.3, "z_loss": 0.2}},
    "more choices than rows": {"num_experts": 64, "experts_per_token": 2},
}


def model(variant: str = "plain", **changes) -> config.ModelConfig:
    own = {**MIXTURE, "balance": {"auxiliary_loss": 0.2, "z_loss": 0.1}, **VARIANTS[variant]}
    return model_fixtures.model(feed_forward=own | changes.pop("feed_forward", {}), **changes)


def activated(name, x):
    return {"silu": jax.nn.silu, "relu_squared": lambda x: jnp.square(jax.nn.relu(x))}[name](x)


def reference(settings, p, x_BTD, is_token_BT):
    """Compute every expert for every token, in float64, and choose afterwards with NumPy."""
    E, k, router = settings.num_experts, settings.experts_per_token, settings.router
    logits = x_BTD @ p["router"] + p.get("router_bias", 0.0)
    probability = jax.nn.softmax(logits)
    each = {"softmax": probability, "softmax_of_chosen": logits, "sigmoid": jax.nn.sigmoid(logits)}[router.scores]
    if router.scores == "sigmoid":
        probability = each / each.sum(-1, keepdims=True)
    chosen = np.zeros(each.shape, bool)
    for at in np.ndindex(each.shape[:2]):
        scores = np.array(jax.lax.stop_gradient(each[at])) + jax.lax.stop_gradient(p.get("selection_bias", 0.0))
        if (groups := router.groups) is not None:
            of_group = scores.reshape(groups.count, -1)
            best = np.sort(of_group, axis=-1)[:, -1 if groups.score == "max" else -2 :].sum(-1)
            for group in np.argsort(-best, kind="stable")[groups.kept :]:
                of_group[group] = -np.inf
        chosen[at][np.argsort(-scores, kind="stable")[:k]] = True
    weights = jnp.where(chosen, each, -jnp.inf if router.scores == "softmax_of_chosen" else 0.0)
    if router.scores == "softmax_of_chosen":
        weights = jax.nn.softmax(weights)
    elif router.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + router.epsilon)
    x = x_BTD @ p["to_latent"] if settings.latent_dim else x_BTD
    up = jnp.einsum("BTD,EFD->BTEF", x, p["up"]) + p.get("up_bias", 0.0)
    if settings.gated:
        gate = jnp.einsum("BTD,EFD->BTEF", x, p["gate"]) + p.get("gate_bias", 0.0)
        if settings.clamp:
            gate, up = jnp.minimum(gate, settings.clamp), jnp.clip(up, -settings.clamp, settings.clamp)
        slope = settings.gate_slope
        gate = gate * jax.nn.sigmoid(slope * gate) if slope else activated(settings.activation, gate)
        hidden = gate * (up + settings.up_offset)
    else:
        hidden = activated(settings.activation, up)
    outputs = jnp.einsum("BTEF,EDF->BTED", hidden, p["down"]) + p.get("down_bias", 0.0)
    y = jnp.einsum("BTED,BTE->BTD", outputs, weights * router.scale * is_token_BT[..., None])
    y = y @ p["from_latent"] if settings.latent_dim else y
    if settings.shared is not None:
        own = p["shared"]
        shared = (activated(settings.activation, x_BTD @ own["gate"]) * (x_BTD @ own["up"])) @ own["down"]
        y += shared * (jax.nn.sigmoid(x_BTD @ p["shared_gate"]) if settings.shared.gate == "sigmoid" else 1.0)
    chosen &= is_token_BT[..., None]
    counts = chosen.sum((0, 1))
    over = counts[None] if settings.balance.over == "microbatch" else chosen.sum(1)
    share = E * over / over.sum(-1, keepdims=True)
    tokens, terms = is_token_BT.sum(), settings.balance
    balanced = (probability * share[:, None] * is_token_BT[..., None]).sum() / tokens
    z = (jax.nn.logsumexp(logits, axis=-1) ** 2 * is_token_BT).sum() / tokens
    entropy = -(probability * jnp.log(probability) * is_token_BT[..., None]).sum() / tokens
    return y, {
        "balance_loss": terms.auxiliary_loss * balanced,
        "router_z_loss": terms.z_loss * z,
        "expert_load": counts.max() / counts.mean(),
        "router_entropy": entropy,
        **({"selection_bias": counts} if router.selection_bias else {}),
    }


def layer(settings: config.ModelConfig) -> tuple:
    """Return a function of parameters, x and padding, and parameters with no zeros."""
    graph, state = nnx.split(nnx.eval_shape(lambda: MixtureFeedForward(settings, nnx.Rngs(0))))
    draw = np.random.default_rng(1)
    parameters = jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * draw.normal(size=leaf.shape), jnp.float32), tree.shapes(state)
    )

    def call(parameters, x_BTD, is_token_BT):
        positions = jnp.zeros(x_BTD.shape[:2], jnp.int32)
        rows = RowContext(positions, OneDocumentMask(x_BTD.shape[1]), None, Dropout(), ~is_token_BT)
        return nnx.merge(graph, parameters)(x_BTD, rows)

    return call, parameters


def inputs(rows=B, tokens=T, seed=0):
    draw = np.random.default_rng(seed)
    is_token = np.ones((rows, tokens), bool)
    is_token[-1, tokens - 3 :] = False
    return jnp.asarray(draw.normal(size=(rows, tokens, D)), jnp.float32), is_token


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_weighted_sum_of_the_chosen_experts_and_so_are_its_gradients(variant):
    settings = model(variant)
    call, parameters = layer(settings)
    x, is_token = inputs()
    d_y = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32) * is_token[..., None]

    def of_jaxlm(parameters, x):
        y, auxiliary = call(parameters, x, is_token)
        return jnp.sum(y * d_y) + sum(auxiliary.losses.values()), (
            y,
            auxiliary.losses | auxiliary.statistics | auxiliary.counts,
        )

    def of_reference(parameters, x):
        y, terms = reference(settings.feed_forward, parameters, x, is_token)
        return jnp.sum(y * d_y) + sum(term for name, term in terms.items() if name.endswith("loss")), (y, terms)

    gradients, (y, terms) = jax.jit(jax.grad(of_jaxlm, (0, 1), has_aux=True))(parameters, x)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (parameters, x))
        expected, (expected_y, expected_terms) = jax.grad(of_reference, (0, 1), has_aux=True)(*wide)
        expected, expected_y, expected_terms = jax.device_get((expected, expected_y, expected_terms))
    outputs = [
        np.where(is_token[..., None], each, 0) for each in (y, expected_y)
    ]  # of padding the shared experts' stay
    model_fixtures.assert_same_numbers(*outputs, 1e-5)
    model_fixtures.assert_same_numbers(terms, expected_terms, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 2e-5)


def test_state_counts_as_no_parameter():
    plain, balanced = model("deepseek_v3"), model("deepseek_v3", feed_forward={"router": BALANCED})
    assert tree.parameter_count(plain) == tree.parameter_count(balanced)


def test_adapters_of_experts_are_refused():
    for name in ("down", "router"):
        said = rf"targets\[0\] = '\*/{name}': layers/.*/{name} is of experts or their router, which have no adapters"
        with pytest.raises(InputError, match=said):
            tree.targets(model(), LoraConfig(rank=2, targets=(f"*/{name}",)))
    attention = tree.targets(model(), LoraConfig(rank=2, targets=("*attention/*",)))
    assert attention == tree.targets(model(), LoraConfig(rank=2))  # all that may have adapters


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_a_decoded_token_reads_the_experts_that_it_chooses(kernels, is_padded):
    """One token reads exactly these, and a row of padding none; many tokens read all."""
    settings = model_fixtures.model(feed_forward=MIXTURE, num_layers=1, vocab_size=64)

    def read(batch):
        work = workload("decode", settings, batch, 8, kernels=kernels, platform="gpu", is_padded=is_padded)
        return sum(op.times * op.least_bytes for op in operations.step(work) if op.scope.endswith("feed_forward/up"))

    one, expert = read(1), 24 * 32 * 2
    assert K * expert <= one < (K + 1) * expert
    assert E * expert < read(64)


@pytest.mark.parametrize("variant", ["plain", "biases"])
def test_padding_gives_nothing_and_changes_nothing(variant):
    call, parameters = layer(model(variant))
    call = jax.jit(call)
    x, is_token = inputs()
    y, auxiliary = call(parameters, x, is_token)
    assert not np.asarray(y[-1, -3:]).any()
    other, other_auxiliary = call(parameters, x.at[-1, -3:].set(jnp.nan), is_token)
    np.testing.assert_array_equal(y[0], other[0])
    np.testing.assert_array_equal(y[-1, :-3], other[-1, :-3])
    jax.tree.map(np.testing.assert_array_equal, auxiliary, other_auxiliary)


def test_permuted_tokens_have_permuted_results_to_the_bit():
    call, parameters = layer(model("deepseek_v3"))
    x, _ = inputs(1, 64)
    is_token, order = np.ones((1, 64), bool), np.random.default_rng(0).permutation(64)
    run = jax.jit(call)
    y, permuted = run(parameters, x, is_token)[0], run(parameters, x[:, order], is_token)[0]
    np.testing.assert_array_equal(y[:, order], permuted)


def test_one_expert_is_the_dense_layer():
    mixture = model(feed_forward={"num_experts": 1, "experts_per_token": 1})
    call, parameters = layer(mixture)
    dense = model_fixtures.model(feed_forward={"d_ff": 24, "activation": "silu", "gated": True})
    graph, _ = nnx.split(nnx.eval_shape(lambda: DenseFeedForward(dense, nnx.Rngs(0))))
    own = {name: jnp.swapaxes(parameters[name][0], 0, 1) for name in ("gate", "up", "down")}
    x, is_token = inputs()
    is_token[:] = True
    expected, _ = jax.jit(lambda own, x: nnx.merge(graph, own)(x, None))(own, x)
    np.testing.assert_allclose(jax.jit(call)(parameters, x, is_token)[0], expected, atol=1e-5)


@functools.cache
def plain_gradients():
    return model_fixtures.first_gradients(stepped(), meshes.make(), rows=of_answers())


def of_answers() -> dict:
    """Return rows of which the first half learn from every other token, as conversations do."""
    rows = model_fixtures.batch()
    half = len(rows["segments"]) // 2
    rows["segments"][:half, ::2] *= -1
    return rows


def stepped() -> config.ModelConfig:
    """A model whose first layer is dense."""
    return model_fixtures.model(model_fixtures.MIXTURE)


@pytest.mark.parametrize(
    "sizes, microbatches",
    sampled(
        [
            pytest.param(sizes, microbatches)
            for sizes in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (1, 2, 4))
            for microbatches in (1, 2)
        ],
        ["(2, 2, 2)-2"],
    ),
    ids=str,
)
def test_meshes_and_microbatches_change_nothing(sizes, microbatches):
    """Neither the loss, nor the terms of layers, of rows of which some learn from few of their tokens."""
    losses, gradients = model_fixtures.first_gradients(stepped(), meshes.make(*sizes), microbatches, of_answers())
    expected_losses, expected = plain_gradients()
    model_fixtures.assert_same_numbers(losses, expected_losses, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@pytest.mark.parametrize(
    "changes",
    sampled(
        [{"remat": "full"}, {"remat": ("up", "gate")}, {"scan_layers": False}],
        ["{'remat': 'full'}", "{'scan_layers': False}"],
    ),
    ids=str,
)
def test_rematerialisation_and_loops_change_nothing(changes):
    losses, gradients = model_fixtures.first_gradients(stepped(), meshes.make(), rows=of_answers(), **changes)
    expected_losses, expected = plain_gradients()
    model_fixtures.assert_same_numbers(losses, expected_losses, 2e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 2e-5)


BALANCED = model_fixtures.MIXTURE["feed_forward"]["router"] | {"selection_bias": True}


@pytest.mark.parametrize(
    "sizes, microbatches", sampled([pytest.param((1, 1, 1), 1), pytest.param((2, 2, 2), 2)], ["(2, 2, 2)-2"]), ids=str
)
def test_a_selection_bias_moves_towards_equal_loads_and_by_nothing_else(sizes, microbatches):
    """Two stacks have one, in turn. Neither gradients, nor weight decay, nor the rounding of bfloat16 reach them."""
    settings = model_fixtures.model(
        feed_forward=model_fixtures.MIXTURE["feed_forward"] | {"router": BALANCED},
        pattern=(
            {"name": "wide", "feed_forward": {"d_ff": 24}},
            {"name": "last", "layers": "rest", "feed_forward": {"balance": {"bias_rate": 0.25}}},
        ),
    )
    optimizer = model_fixtures.optimization(weight_decay=0.5, groups=[{"pattern": "*bias", "weight_decay": 0.9}])
    sections = model_fixtures.sections(microbatches=microbatches, dtype="bfloat16")
    batch = model_fixtures.batch()
    _, state = model_fixtures.run_steps(settings, sections, [batch], meshes.make(*sizes), optimizer)
    wide, last = (state.parameters["layers"][name]["feed_forward"]["selection_bias"] for name in ("wide", "last"))
    assert set(np.unique(np.abs(wide))) <= {0.0, np.float32(0.001)} and set(np.unique(np.abs(last))) <= {0.0, 0.25}
    assert state.working["layers"]["wide"]["feed_forward"]["selection_bias"].dtype == np.float32

    module = nnx.merge(tree.abstract(settings)[0], jax.tree.map(jnp.asarray, model_fixtures.parameters(settings)))
    mask, padding = packed_causal_mask(batch["positions"]), jnp.asarray(batch["segments"] == 0)
    hidden = jax.jit(lambda: module.hidden(batch["tokens"], batch["positions"], mask, padding_BT=padding)[2])
    count = np.asarray(hidden().counts["selection_bias"])  # [layer, expert]
    assert (count.sum(-1) == 3 * (~np.asarray(padding)).sum()).all()
    expected = np.sign(count.mean(-1, keepdims=True) - count)
    assert (np.sign([*wide, *last]) == expected).mean() > 0.9  # bfloat16 decides a few near ties otherwise


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"experts_per_token": 9}, "experts_per_token = 9 is more than .*num_experts = 8; choose fewer"),
        ({"balance": {"bias_rate": 0.1}}, "bias_rate = 0.1 moves a selection bias, which .*router has none of"),
        ({"router": {"normalise": False, "epsilon": 0.1}}, "epsilon = 0.1 is added to a sum that nothing is divided"),
        ({"router": {"scores": "softmax_of_chosen", "normalise": False}}, "whose sum is 1; leave it out"),
        ({"router": {"scores": "softmax_of_chosen", "selection_bias": True}}, "is added to scores of all experts"),
        ({"gate_slope": 1.7, "activation": "gelu"}, "takes the place of an activation; leave out activation = 'gelu'"),
        ({"gated": False, "clamp": 7.0}, "gated = false has no gate, which clamp, gate_slope and up_offset need"),
        ({"router": {"groups": {"count": 3, "kept": 1}}}, "groups.count = 3 does not divide .*num_experts = 8"),
        ({"router": {"groups": {"count": 4, "kept": 5}}}, "groups.kept = 5 is more than groups.count = 4"),
        ({"router": {"groups": {"count": 4, "kept": 1}}}, "groups keep 2 experts, fewer than .*experts_per_token = 3"),
        (
            {"experts_per_token": 1, "router": {"groups": {"count": 8, "kept": 1, "score": "top2_sum"}}},
            '"top2_sum" needs groups of two experts',
        ),
    ],
)
def test_bad_settings_are_one_line(changes, said):
    with pytest.raises(ValidationError, match=said):
        model(feed_forward=changes)


def test_a_plan_counts_what_a_token_reads():
    """Mixtral 8x7B has 46.7 billion parameters, of which 12.9 billion are active (arXiv:2401.04088, section 2)."""
    mixtral = config.ModelConfig(
        vocab_size=32000,
        context_length=32768,
        num_layers=32,
        d_model=4096,
        attention={"num_heads": 32, "num_kv_heads": 8},
        feed_forward={"kind": "mixture", "num_experts": 8, "experts_per_token": 2, "d_ff": 14336},
    )
    work = workload("train", mixtral, batch=8, sequence=1024)
    counts = parameter_counts(work)
    assert counts == {
        "total": 46_702_792_704,
        "active": 12_879_925_248,
        "embedding": 2 * 32000 * 4096,
        "trainable": 46_702_792_704,
    }
    figures = flops(work)
    matrices = counts["active"] - 32000 * 4096 - 65 * 4096  # without the embedding that is looked up, and norms
    assert figures.napkin == 6 * matrices * 8 * 1024
    attention = 6 * 2 * 32 * 1024 * 4096 * 8 * 1024
    assert figures.model == figures.napkin + attention


@pytest.mark.parametrize("kind", sampled(["muon", "adafactor"], ["muon"]))
def test_an_optimizer_takes_each_expert_as_a_matrix_of_its_own(kind):
    """The update of one expert is that of a model with this expert alone; without a gradient it is zero."""
    settings = model_fixtures.optimization(kind=kind, clip_norm=1e9, weight_decay=0.0)

    def updates(experts):
        mixture = model(num_layers=2, feed_forward={"num_experts": len(experts), "experts_per_token": 1})
        abstract, transform = tree.abstract(mixture)[1], optimizer(settings, tree.abstract(mixture)[1])
        parameters = jax.tree.map(jnp.ones_like, model_fixtures.parameters(mixture))
        gradients = jax.tree.map(jnp.zeros_like, parameters)
        for name in ("up", "down"):
            shape = gradients["layers"]["feed_forward"][name].shape
            each = [(e > 0) * np.random.default_rng(e).normal(size=(2, *shape[2:])) for e in experts]
            gradients["layers"]["feed_forward"][name] = jnp.asarray(np.stack(each, 1), jnp.float32)
        assert tree.paths(tree.dimensions(abstract))["layers/feed_forward/up"].stack == (0, 1)

        @jax.jit
        def update(gradients, parameters):
            return transform.update(gradients, transform.init(parameters), parameters)[0]

        return update(gradients, parameters)["layers"]["feed_forward"]

    several, alone = updates([3, 0, 7]), updates([7])
    for name in ("up", "down"):
        np.testing.assert_allclose(several[name][:, 2], alone[name][:, 0], rtol=1e-4, atol=1e-7)
        assert not np.asarray(several[name][:, 1]).any() and np.asarray(several[name][:, 0]).any()


def test_a_run_that_is_resumed_has_the_same_biases_to_the_bit(tmp_path):
    settings = model_fixtures.model(
        feed_forward=model_fixtures.MIXTURE["feed_forward"] | {"router": BALANCED}, num_layers=2
    )
    batches, mesh = [model_fixtures.batch(seed=i) for i in range(2)], meshes.make()
    with jax.set_mesh(mesh), checkpoints.Checkpoints(tmp_path, keep=1) as saved:
        steps = model_fixtures.jitted(settings, model_fixtures.sections(), mesh, model_fixtures.optimization())
        state, _ = steps.train(steps.begin(model_fixtures.placed(settings, mesh)), put_batch(batches[0], mesh))
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        saved.save(state, None)
        expected, _ = steps.train(state, put_batch(batches[1], mesh))
        saved.wait()
        resumed, _ = steps.train(
            steps.resume(checkpoints.restore_state(tmp_path, 1, like)), put_batch(batches[1], mesh)
        )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(expected))
    assert np.asarray(expected.parameters["layers"]["feed_forward"]["selection_bias"]).any()


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, chips, sizes",
    [
        ("train", "h200-sxm:8", (2, 2, 2)),
        ("decode", "h200-sxm:8", (2, 2, 2)),
        ("train", "tpu-v5e:2x4", (2, 2, 2)),
        ("decode", "tpu-v5e:2x2", (1, 1, 4)),
    ],
    ids=str,
)
def test_compiled_programs_multiply_what_is_counted(kind, chips, sizes):
    """Also on a chip no product is of all experts: what kernels declare and what XLA multiplies is what is counted."""
    settings = model_fixtures.model(
        model_fixtures.MIXTURE,
        d_model=512,
        context_length=1024,
        vocab_size=2048,
        attention={"num_heads": 8, "num_kv_heads": 4},
        feed_forward=model_fixtures.MIXTURE["feed_forward"]
        | {"router": BALANCED, "d_ff": 256, "shared": {"d_ff": 256}},
    )
    experiment = model_fixtures.experiment(settings, batch=32, sequence=1024, dtype="bfloat16")
    target = Target.parse(chips)
    mesh = make_mesh(meshes.layout(*sizes), targets.devices(target))
    found = report.compile(experiment, kind, target, mesh, False).report
    assert found.flops == found.counted_flops and found.kernel_flops == found.counted_kernel_flops


@ELSEWHERE
def test_gradients_of_experts_are_scattered_also_on_tpus():
    """XLA for TPUs would send them whole, each to every device."""
    settings = model_fixtures.MIXTURE | {"feed_forward": {"kind": "mixture", "num_experts": 8, "d_ff": 256}}
    described = model_fixtures.model(settings, d_model=192, num_layers=2, vocab_size=64)
    experiment = model_fixtures.experiment(described, dtype="bfloat16", batch=4)
    mesh = meshes.make(1, 4, 1, devices=targets.devices(Target.parse("tpu-v5e:2x2")))
    program = hlo.parse(step_programs(experiment, "train", mesh).step.lower().compile().as_text())
    sent = collectives.collectives(program, dict(mesh.shape))
    scattered = [each for each in sent if each.kind == "reduce-scatter" and "mixture/feed_forward" in each.scope]
    assert sum(each.count * each.bytes for each in scattered) == 3 * 8 * 256 * 192 * 2  # one layer's matrices
