"""The fused loss: chunks, extremes, labels over devices, and the memory that it saves."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads
from markers import ELSEWHERE
from matrices import sampled
from numerics import drawn

from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.lowering import targets as chips
from kernels_pallas import linear_cross_entropy
from kernels_pallas.core import interpreted
from kernels_pallas.core.products import einsum_in_float32
from kernels_pallas.linear_cross_entropy import chunks, costs
from kernels_pallas.linear_cross_entropy.loop import KERNELS
from kernels_pallas.linear_cross_entropy.reference import linear_cross_entropy as reference
from kernels_pallas.linear_cross_entropy.xla import cross_entropy

REDUCTIONS = ("none", "sum")


def each(*kept):
    """Parametrise a test over implementations and reductions: these quickly, all in the exhaustive suite."""
    cases = [pytest.param(name, reduction) for name in ("reference", *KERNELS) for reduction in REDUCTIONS]
    return pytest.mark.parametrize("implementation, reduction", sampled(cases, kept))


EVERYTHING = dict(soft_cap=4.0, z_loss=1e-2)


def operands(tokens=(22,), width=12, labels=40, transposed=False):
    hidden, unembedding = drawn((*tokens, width), (labels, width) if transposed else (width, labels))
    random = np.random.default_rng(2)
    targets = np.where(random.random(tokens) < 0.2, -100, random.integers(labels, size=tokens))
    weights = random.random(tokens, np.float32)
    return hidden, unembedding, jnp.asarray(targets.astype(np.int32)), jnp.asarray(weights)


def compiled(function, targets, **options):
    """Return a jitted function of states, unembedding and weights: the result, log Z where requested, and gradients
    with other cotangents for each token.
    """

    def objective(hidden, unembedding, weights):
        result = function(hidden, unembedding, targets, weights, **options)
        parts = jax.tree.leaves(result)
        return sum(jnp.sum(jnp.sin(i + 0.1 * x)) for i, x in enumerate(parts)), result

    return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))


def loss_and_gradients(function, hidden, unembedding, targets, weights, **options):
    return compiled(function, targets, **options)(hidden, unembedding, weights)


def assert_close(got, want):
    """Assert equality up to the order of float32 sums: a few units of the largest number, per array."""
    for a, b in zip(*map(jax.tree.leaves, jax.device_get((got, want))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * np.max(np.abs(b), initial=1.0))


@each("chunked-sum", "triton-none")
@interpreted()
def test_chunks_of_tokens_change_nothing(constant, implementation, reduction):
    """Split 22 tokens into chunks of 8; the last chunk has two tokens of padding."""
    constant(chunks, "LOGITS", 40 * 9)
    assert chunks.chunk(22, 40) == (3, 8)
    options = dict(reduction=reduction, return_log_z=True, **EVERYTHING)
    fused = functools.partial(linear_cross_entropy, implementation=implementation)
    hidden, unembedding, targets, weights = operands()
    run = compiled(fused, targets, **options)
    got = run(hidden, unembedding, weights)
    assert_close(got, loss_and_gradients(reference, hidden, unembedding, targets, weights, **options))
    chex.assert_trees_all_equal(got, run(hidden, unembedding, weights))


@pytest.mark.parametrize(
    "implementation, reduction",
    sampled(
        [pytest.param(name, reduction) for name in ("chunked", "triton") for reduction in REDUCTIONS], ["chunked-sum"]
    ),
)
@interpreted()
def test_small_cotangents_are_not_lost_in_float16(constant, implementation, reduction):
    """In a mean over a million tokens each label's cotangent is a tenth of float16's smallest number.

    The chunks have 64 tokens; one chunk has zero weight.
    """
    constant(chunks, "LOGITS", 2000 * 64)
    hidden, unembedding, targets, _ = operands((192,), 32, 2000)
    narrow = [(0.5 * x).astype(jnp.float16) for x in (hidden, unembedding)]
    weights = jnp.where(jnp.arange(192) < 64, 0.0, 1e-6)

    def gradients(function, dtype, **how):
        def loss(arrays):
            return jnp.sum(function(*arrays, targets, weights, reduction=reduction, **how))

        return jax.jit(jax.grad(loss))([x.astype(dtype) for x in narrow])

    got = gradients(linear_cross_entropy, jnp.float16, implementation=implementation)
    for of, wanted in zip(got, gradients(reference, jnp.float32), strict=True):
        # The remaining error is the rounding to float16 itself, whose smallest number is `tiny`.
        tiny = float(jnp.finfo(jnp.float16).smallest_subnormal)
        np.testing.assert_allclose(of.astype(jnp.float32), wanted, rtol=2e-3, atol=tiny)


def test_chunks_are_alike_and_hardly_padded():
    for vocabulary in (50257, 128256, 2**22):
        for tokens in (1, 2100, 3072, 5000, 32768):
            n, size = chunks.chunk(tokens, vocabulary)
            assert n * size >= tokens and size * vocabulary <= max(chunks.LOGITS, tokens * vocabulary // n + vocabulary)
            assert n * size - tokens < n * 128  # less than a tile each
    assert chunks.chunk(32768, 128256) == (16, 2048)


@each("chunked-sum", "mosaic_tpu-none")
@interpreted()
def test_padding_of_the_vocabulary_does_not_contribute(implementation, reduction):
    """The 40 labels are padded with 24 logits of 0, far above all others: at 200 below, exp(0 − log Z) is infinite.

    Each token has one likely label: for others, the rounding of so large a log Z would show.
    """
    hidden, unembedding, targets, weights = operands()
    hidden, unembedding = jnp.abs(hidden) + 1, -40 * (jnp.abs(unembedding) + 1)
    unembedding = unembedding.at[:, 7].set(-39.0)
    arguments = hidden, unembedding, targets, weights
    fused = functools.partial(linear_cross_entropy, implementation=implementation)
    want = loss_and_gradients(reference, *arguments, reduction=reduction)
    assert float(jnp.max(hidden.reshape(-1, hidden.shape[-1]) @ unembedding)) < -200
    assert_close(loss_and_gradients(fused, *arguments, reduction=reduction), want)


@pytest.mark.parametrize("implementation", sampled(KERNELS, ["chunked"]))
@interpreted()
def test_gradients_made_forward_under_vmap_and_checkpoint(constant, implementation):
    constant(chunks, "LOGITS", 40 * 9)
    hidden, unembedding, targets, weights = operands((3, 22))
    fused = functools.partial(linear_cross_entropy, implementation=implementation, reduction="sum")
    gradient = jax.grad(jax.checkpoint(fused), argnums=(0, 1, 3))
    got = jax.jit(jax.vmap(gradient, in_axes=(0, None, 0, 0)))(hidden, unembedding, targets, weights)
    alone = jax.jit(gradient)
    want = [alone(hidden[i], unembedding, targets[i], weights[i]) for i in range(3)]
    assert_close(got, jax.tree.map(lambda *xs: jnp.stack(xs), *want))


@pytest.mark.parametrize("reduction", sampled(REDUCTIONS, ["sum"]))
def test_gradients_are_those_of_finite_differences(reduction):
    hidden, unembedding, targets, weights = operands((3,), 4, 7)
    fused = functools.partial(linear_cross_entropy, reduction=reduction, implementation="chunked", **EVERYTHING)
    check_grads(lambda h, u, w: fused(h, u, targets, w), (hidden, unembedding, weights), 1, ["rev"], 2e-2, 2e-2)


@pytest.mark.parametrize("implementation", sampled(KERNELS, ["chunked", "mosaic_tpu"]))
@interpreted()
def test_nothing_counts_where_every_target_is_ignored(implementation):
    hidden, unembedding, targets, weights = operands()
    fused = functools.partial(linear_cross_entropy, implementation=implementation, reduction="sum")
    ignored = jnp.full_like(targets, -1)
    (_, total), gradients = loss_and_gradients(fused, hidden, unembedding, ignored, weights, **EVERYTHING)
    assert total == 0.0
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, gradients))


@pytest.mark.parametrize("implementation", sampled(KERNELS, ["chunked", "triton"]))
@interpreted()
def test_certainty_has_neither_loss_nor_gradient(implementation):
    """One-hot states with a logit of 1e5 at the target: exp would overflow without the largest subtracted."""
    targets = jnp.arange(12)
    fused = functools.partial(linear_cross_entropy, implementation=implementation)

    @jax.jit
    def losses_and_gradients(hidden, unembedding):
        losses, pull_back = jax.vjp(lambda h, u: fused(h, u, targets), hidden, unembedding)
        return losses, *pull_back(losses + 1)

    one = np.eye(12, dtype=np.float32)
    expected = np.zeros(12, np.float32), *[np.zeros_like(one)] * 2
    chex.assert_trees_all_equal(losses_and_gradients(1e5 * one, one), expected)


def test_a_target_beyond_the_labels_is_seen():
    hidden, unembedding, targets, _ = operands()
    for implementation in ("reference", "chunked"):
        beyond = np.where(np.arange(22) == 3, 40, targets)
        losses = linear_cross_entropy(hidden, unembedding, beyond, implementation=implementation)
        assert np.isnan(losses).tolist() == (np.arange(22) == 3).tolist()


def mesh_of(data, fsdp, tensor, devices=None):
    devices = jax.devices()[:8] if devices is None else devices
    return Mesh(np.array(devices).reshape(data, fsdp, tensor), ("data", "fsdp", "tensor"))


def specs(transposed):
    hidden = PartitionSpec(("data", "fsdp"))
    return hidden, PartitionSpec("tensor", "fsdp") if transposed else PartitionSpec("fsdp", "tensor")


@pytest.mark.parametrize(
    "shape, implementation, transposed, reduction",
    sampled(
        [
            pytest.param(*case, reduction)
            for case in (
                ((2, 1, 4), "chunked", False),
                ((2, 2, 2), "chunked", True),
                ((1, 1, 8), "triton", False),
                ((4, 2, 1), "mosaic_tpu", True),
            )
            for reduction in REDUCTIONS
        ],
        ["(2, 2, 2)-chunked-True-sum", "(1, 1, 8)-triton-False-none"],
    ),
    ids=str,
)
@interpreted()
def test_labels_and_tokens_over_devices(constant, shape, implementation, transposed, reduction):
    """Every gradient equals that on one device, and no shard takes a neighbour's label for its own."""
    constant(chunks, "LOGITS", 40 * 2)
    arguments = operands((8, 3), 12, 40, transposed)
    options = dict(reduction=reduction, return_log_z=True, transposed=transposed, **EVERYTHING)
    want = loss_and_gradients(reference, *arguments, **options)
    with jax.set_mesh(mesh_of(*shape)):
        fused = functools.partial(linear_cross_entropy, partition=specs(transposed))
        got = loss_and_gradients(fused, *arguments, implementation=implementation, **options)
    assert_close(got, want)


def test_inside_a_shard_map_over_tokens():
    """Without a partition, in a shard_map that checks: JAX sums the gradient of a replicated operand."""
    hidden, unembedding, targets, weights = operands((24,))
    fused = functools.partial(linear_cross_entropy, implementation="chunked", **EVERYTHING)
    rows, whole = PartitionSpec("data"), PartitionSpec()
    mesh = Mesh(jax.devices()[:4], ("data",))
    sharded = jax.shard_map(fused, mesh=mesh, in_specs=(rows, whole, rows, rows), out_specs=rows)
    want = loss_and_gradients(reference, hidden, unembedding, targets, weights, **EVERYTHING)
    assert_close(loss_and_gradients(sharded, hidden, unembedding, targets, weights), want)


@pytest.mark.parametrize("reduction", sampled(REDUCTIONS, ["none"]))
@interpreted()
def test_with_a_partition_inside_a_shard_map_that_checks(reduction):
    """Data is sharded from outside, fsdp and tensor by the operation itself."""
    hidden, unembedding, targets, weights = operands((8, 3), 12, 40)
    lies = PartitionSpec("fsdp"), PartitionSpec(None, "tensor")
    fused = functools.partial(linear_cross_entropy, implementation="triton", partition=lies, reduction=reduction)
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def local(*operands):
        return fused(*operands) if reduction == "none" else fused(*operands)[None]

    def unfused(*operands):
        losses = reference(*operands)
        return losses if reduction == "none" else jnp.sum(losses.reshape(2, -1), axis=1)

    want = loss_and_gradients(unfused, hidden, unembedding, targets, weights)
    with jax.set_mesh(mesh_of(2, 2, 2)):
        sharded = jax.shard_map(local, in_specs=(rows, whole, rows, rows), out_specs=rows, axis_names={"data"})
        got = loss_and_gradients(sharded, hidden, unembedding, targets, weights)
    assert_close(got, want)


def test_channels_over_devices_that_have_all_tokens():
    arguments = operands((2, 3))
    want = loss_and_gradients(reference, *arguments)
    with jax.set_mesh(mesh_of(1, 4, 2)):
        lies = PartitionSpec(), PartitionSpec("fsdp", "tensor")
        fused = functools.partial(linear_cross_entropy, implementation="chunked", partition=lies)
        assert_close(loss_and_gradients(fused, *arguments), want)


R, D, V = 32768, 4096, 128256


WHOLE = (PartitionSpec(),) * 3


def on_h200(objective, *arguments, devices=1, shape=(1, 1, 1), parts=WHOLE):
    """Return value_and_grad of objective(hidden, unembedding, targets), compiled for H200s."""
    mesh = mesh_of(*shape, devices=chips.devices(Target.parse(f"h200-sxm:{devices}")))
    structs = [
        jax.ShapeDtypeStruct(s, t, sharding=NamedSharding(mesh, p)) for (s, t), p in zip(arguments, parts, strict=True)
    ]
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(*structs).compile()


def largest(text: str) -> int:
    """Return the size of the largest array that a compiled program names."""
    shapes = re.findall(r"\b\w+\[([\d,]+)\]", text)
    return max((int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes), default=1)


@ELSEWHERE
@pytest.mark.parametrize("reduction", sampled(REDUCTIONS, ["sum"]))
def test_memory_of_a_chunk(reduction):
    """The loss at 32768 × 4096 × 128256 takes at most 15 % of the unfused loss's memory, and no logits."""
    arguments = ((R, D), jnp.bfloat16), ((D, V), jnp.bfloat16), ((R,), jnp.int32)

    def loss_of_logits(hidden, unembedding, targets):
        logits = einsum_in_float32("RD,DV->RV", hidden, unembedding)
        return jnp.sum(cross_entropy(logits[None], targets[None])[0]) / R

    fused_loss = functools.partial(linear_cross_entropy, reduction=reduction)
    fused = on_h200(lambda *operands: jnp.sum(fused_loss(*operands)) / R, *arguments)
    unfused = on_h200(loss_of_logits, *arguments)
    assert largest(unfused.as_text()) == R * V
    assert largest(fused.as_text()) == D * V  # the unembedding
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in (fused, unfused)]
    assert temporaries[0] <= 0.15 * temporaries[1]


@ELSEWHERE
def test_logits_are_never_sent():
    """Over fsdp × tensor the unembedding is gathered; only maxima and sums of tokens and the gradients are reduced."""
    arguments = ((64, 128, 256), jnp.bfloat16), ((256, 32768), jnp.bfloat16), ((64, 128), jnp.int32)
    hidden, unembedding = specs(transposed=False)
    fused = functools.partial(linear_cross_entropy, reduction="sum", partition=(hidden, unembedding))
    program = on_h200(fused, *arguments, devices=4, shape=(1, 2, 2), parts=(hidden, unembedding, hidden))
    sent = re.findall(r"= (.*?) (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", program.as_text())
    assert {kind for _, kind in sent} == {"all-gather", "all-reduce", "reduce-scatter"}
    assert max(largest(shapes) for shapes, _ in sent) == 256 * 32768 // 2
    assert "triton" in program.as_text()


def chosen(device, tokens, labels):
    mesh = AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=device)
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, 64), (64, labels))]
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(linear_cross_entropy)(*structs, jax.ShapeDtypeStruct((tokens,), jnp.int32)))
    return "kernel" if "pallas_call" in text else "chunked" if "scan" in text else "xla"


@interpreted()
def test_a_sum_takes_three_products():
    """The gradients' FLOPs too are counted as stated, though they are made in the forward pass."""
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 64), (64, V))]
    targets = jax.ShapeDtypeStruct((4096,), jnp.int32)
    fused = functools.partial(linear_cross_entropy, reduction="sum", implementation="triton")
    rows = count(jax.grad(fused, argnums=(0, 1)), *structs, targets).rows
    assert sum(row.flops for row in rows if row.kind == "matmul") == 3 * 2 * 4096 * 64 * V
    stated = [sum(numbers) for numbers in zip(*costs(*structs, targets, reduction="sum"), strict=True)]
    here = [row for row in rows if row.kind in ("kernel", "matmul")]
    assert [sum(r.flops for r in here), sum(r.bytes_in + r.bytes_out for r in here)] == [stated[0], stated[2]]


def test_chosen_by_chip_and_by_the_number_of_logits():
    h200, cpu = AbstractDevice("NVIDIA H200", 132, "gpu"), AbstractDevice("cpu", None, "cpu")
    assert chosen(h200, 4096, 128256) == chosen(AbstractDevice("TPU v5 lite", 1, "tpu"), 4096, 128256) == "kernel"
    assert chosen(h200, 128, 1000) == chosen(cpu, 128, 1000) == "xla"
    assert chosen(cpu, 4096, 128256) == chosen(AbstractDevice("Tesla V100", 80, "gpu"), 4096, 128256) == "chunked"


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(unembedding=jnp.zeros((40, 12))), r"hidden is \[22, 12\] and unembedding \[40, 12\]; they must be"),
        (
            dict(unembedding=jnp.zeros((12, 40), jnp.bfloat16)),
            "unembedding is bfloat16; it must be float32 like hidden",
        ),
        (dict(unembedding=jnp.zeros((12, 0))), r"unembedding is \[12, 0\]; it must have at least one label"),
        (dict(targets=jnp.zeros(22)), "targets is float32; it must hold integers"),
        (dict(weights=jnp.zeros(21)), r"weights has shape \[21\]; it must be \[22\]"),
        (dict(soft_cap=0.0), "soft_cap = 0.0; it must be positive"),
        (dict(reduction="mean"), "reduction = 'mean'; it must be 'none' or 'sum'"),
        (dict(partition=(PartitionSpec(), PartitionSpec())), "partition needs a mesh in context"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_operands_that_do_not_fit(change, message):
    hidden, unembedding, targets, weights = operands()
    arguments = dict(hidden=hidden, unembedding=unembedding, targets=targets, weights=weights) | change
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {message}"):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize(
    "partition, message",
    [
        ((PartitionSpec(None, "tensor"), PartitionSpec()), "shards hidden's channels over"),
        ((PartitionSpec("tensor"), PartitionSpec(None, "tensor")), "shards tokens over .* and labels over"),
        ((PartitionSpec("data"), PartitionSpec(("data", "fsdp"))), "shards channels over"),
        ((PartitionSpec("rows"), PartitionSpec()), "partition names 'rows'; the mesh has data, fsdp, tensor"),
        ((PartitionSpec(None, None, "fsdp"), PartitionSpec()), "hidden, which has 2 dimensions"),
        (
            (PartitionSpec(("data", "fsdp", "tensor")), PartitionSpec()),
            "shards 12 of hidden over data, fsdp, tensor, 8",
        ),
        ((PartitionSpec(("data", "data")), PartitionSpec()), "shards tokens over .*; each may be there but once"),
        (
            (PartitionSpec(), PartitionSpec("fsdp", "fsdp")),
            "shards the unembedding over .*; each may be there but once",
        ),
        ((PartitionSpec(PartitionSpec.UNCONSTRAINED), PartitionSpec()), "of hidden; it must name mesh axes"),
        ((PartitionSpec("data", unreduced={"fsdp"}), PartitionSpec()), "of hidden; it must name mesh axes"),
    ],
)
def test_partitions_that_cannot_be(partition, message):
    with jax.set_mesh(mesh_of(2, 2, 2)), pytest.raises(ValueError, match=message):
        linear_cross_entropy(*operands((12,)), partition=partition)


def test_a_partition_says_nothing_of_what_a_shard_map_around_it_parts():
    hidden, unembedding, targets, _ = operands((16,))

    def local(hidden, targets):
        partition = PartitionSpec("data"), PartitionSpec()
        return linear_cross_entropy(hidden, unembedding, targets, implementation="chunked", partition=partition)

    parts = PartitionSpec("data")
    with jax.set_mesh(mesh_of(2, 2, 2)), pytest.raises(ValueError, match="over 'data', which the shard_map"):
        jax.jit(jax.shard_map(local, in_specs=(parts, parts), out_specs=parts, axis_names={"data"}))(hidden, targets)


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
@pytest.mark.parametrize(
    "dtype, labels",
    sampled([pytest.param("uint8", 256), pytest.param("int8", 200), pytest.param("uint16", 2**16)], ["int8-200"]),
)
@interpreted()
def test_targets_may_be_of_narrow_integers(implementation, dtype, labels):
    """The number of labels itself does not fit these dtypes."""
    hidden, unembedding, targets, _ = operands(tokens=(5,), width=4, labels=labels)
    targets = jnp.clip(targets, 0, 100)
    run = functools.partial(linear_cross_entropy, hidden, unembedding, implementation=implementation)
    np.testing.assert_array_equal(run(targets.astype(dtype)), run(targets))


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
@interpreted()
def test_a_target_beyond_the_labels_is_nan_and_moves_nothing(implementation):
    hidden, unembedding, _, _ = operands(tokens=(2,), labels=16)

    def loss(hidden, reduction):
        options = dict(reduction=reduction, implementation=implementation)
        return jnp.sum(linear_cross_entropy(hidden, unembedding, jnp.array([16, 3]), **options))

    of_both = jax.jit(lambda hidden: [jax.value_and_grad(loss)(hidden, reduction) for reduction in REDUCTIONS])
    for value, gradient in jax.device_get(of_both(hidden)):
        assert np.isnan(value) and np.all(gradient[0] == 0) and np.all(gradient[1] != 0)


@pytest.mark.parametrize("implementation", list(KERNELS))
@interpreted()
def test_labels_that_are_ruled_out_may_come_first(implementation):
    """In a block of logits of −∞, subtracting the largest makes no NaN."""
    hidden, unembedding = np.ones((3, 2), np.float32), np.ones((2, 9000), np.float32)
    unembedding[:, :4096] = -np.inf
    run = functools.partial(linear_cross_entropy, *map(jnp.asarray, (hidden, unembedding, np.full(3, 8999, np.int32))))
    np.testing.assert_allclose(run(implementation=implementation), np.log(9000 - 4096), rtol=1e-6)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(soft_cap=float("nan")), "soft_cap = nan; it must be positive"),
        (dict(z_loss=-1.0), "z_loss = -1.0; it must be 0 or positive"),
        (dict(z_loss=None), "z_loss = None; it must be a number"),
        (dict(transposed="yes"), "transposed = 'yes'; it must be True or False"),
        (dict(partition=PartitionSpec("data")), "partition = .*; it must be two PartitionSpecs"),
        (dict(partition=(None, PartitionSpec())), "partition = .*; it must be two PartitionSpecs"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_options_of_the_loss_are_refused(wrong, message):
    hidden, unembedding, targets, _ = operands()
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {message}"):
        linear_cross_entropy(hidden, unembedding, targets, **wrong)


@each("reference-none", "chunked-sum", "triton-sum", "mosaic_tpu-none")
@interpreted()
def test_a_weight_of_what_counts_for_nothing_may_be_nan(implementation, reduction):
    hidden, unembedding, targets, weights = operands()
    weights = jnp.where(targets < 0, jnp.nan, weights)

    def total(hidden, unembedding, weights):
        options = dict(reduction=reduction, implementation=implementation)
        return jnp.sum(linear_cross_entropy(hidden, unembedding, targets, weights, **options))

    loss, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(hidden, unembedding, weights)
    chex.assert_tree_all_finite((loss, gradients))
    assert not np.any(gradients[2][targets < 0])
