"""Latent attention: against attention written out in NumPy, its two forms against each other, and what it keeps."""

from collections import Counter
from typing import NamedTuple

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
from workload_fixtures import changed, workload

from jaxlm.config import mesh_layout
from jaxlm.core.errors import InputError
from jaxlm.costs.counted import traffic
from jaxlm.costs.counted.cache import kv_bytes_per_token, kv_cache
from jaxlm.costs.counted.device import device_step
from jaxlm.costs.counted.layer_memory import kept
from jaxlm.costs.hardware.target import Target
from jaxlm.inference.paged_cache import PageLayout
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.settings import EngineSettings
from jaxlm.lowering import report, targets
from jaxlm.models import tree
from jaxlm.models.attention import latent
from jaxlm.models.attention.latent import LatentAttention
from jaxlm.models.cache import OwnTokens
from jaxlm.models.config import ModelConfig
from jaxlm.models.doors import Dropout
from jaxlm.models.positions import LayerRows, packed_causal_mask
from jaxlm.models.rows import LayerIndex
from jaxlm.models.views import CacheView
from jaxlm.parallel import layout_choice
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.rules import TRAIN

B, T, D = 2, 11, 32
SIZES = model_fixtures.LATENT["attention"]
# What each changes of LATENT, whose values are narrower than its keys.
VARIANTS = {
    "plain": {},
    "no latent of queries": {"query_rank": None},
    "wide values": {"value_dim": 40},
    "scaled": {"scale": 0.3},
    "one head": {"num_heads": 1, "rope_dim": 2},
}


def model(variant: str = "plain", **changes) -> ModelConfig:
    return model_fixtures.model(
        **{**model_fixtures.LATENT, "attention": {**SIZES, **VARIANTS[variant]}, **changes},
    )


class KeptTokens(NamedTuple):
    """A cache that says that it has earlier tokens, and has those of this pass."""

    own: OwnTokens = OwnTokens()

    is_own_pass = False

    def update(self, rows, **new):
        return KeptTokens(self.own.update(rows, **new))

    def view(self) -> CacheView:
        return self.own.view()


_OWN = OwnTokens()


def call(settings: ModelConfig, dtype: str = "float32"):
    """Return the layer as a function of its parameters, x and a cache, its parameters, and x, two documents a row."""
    block = settings.layers[0]
    with jax.enable_x64(dtype == "float64"):
        graph, state = nnx.split(LatentAttention(settings, nnx.Rngs(3)))
        draw, structure = np.random.default_rng(5), jax.tree.structure(state)
        paths = [path for path, _ in nnx.to_flat_state(state)]
        drawn = (draw.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 1.0) for x in jax.tree.leaves(state))
        parameters = {path: jnp.asarray(x, dtype) for path, x in zip(paths, drawn, strict=True)}
        x_BTD = jnp.asarray(draw.standard_normal((B, T, D)), dtype)
    positions_BT = jnp.asarray([[*range(7), *range(4)], range(T)], jnp.int32)

    zero = jnp.zeros((), jnp.int32)
    rows = LayerRows(settings, positions_BT, packed_causal_mask(positions_BT), Dropout())
    of_layer = rows.of(LayerIndex(zero, (block,), zero, "layers", zero))

    def layer(parameters: dict, x_BTD: jax.Array, cache=_OWN) -> jax.Array:
        module = nnx.merge(graph, jax.tree.unflatten(structure, [parameters[path] for path in paths]))
        return module(x_BTD, of_layer, cache)[0]

    return layer, parameters, x_BTD


def rms(x, scale):
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * scale


def rotated(x, positions):
    """Rotate the pairs (x[i], x[i + R/2]) of [T, …, R] by position · θ^(−2i/R)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angle).reshape(len(x), *[1] * (x.ndim - 2), half) for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def written_out(settings, parameters, x_TD):
    """Return the layer's output for a document, as section 2.1 of the paper has it, in float64."""
    a, p = settings.attention, {"/".join(path): np.asarray(x, np.float64) for path, x in parameters.items()}
    x, positions, R = np.asarray(x_TD, np.float64), np.arange(len(x_TD)), a.rope_dim
    query_input = rms(x @ p["query_latent"], p["query_norm/scale"]) if a.query_rank else x
    query = np.einsum("tq,qne->tne", query_input, p["query_from_latent" if a.query_rank else "query"])
    query = np.concatenate([rotated(query[..., :R], positions), query[..., R:]], -1)
    latent = rms(x @ p["latent"], p["latent_norm/scale"])
    shared = rotated(x @ p["rope_key"], positions)
    value = np.einsum("tc,cnv->tnv", latent, p["value"])
    nope = np.einsum("tc,cnh->tnh", latent, p["key"])
    key = np.concatenate([np.broadcast_to(shared[:, None], (*nope.shape[:2], R)), nope], -1)
    scores = np.einsum("tne,sne->nts", query, key) * (a.scale or (a.nope_dim + R) ** -0.5)
    weights = model_fixtures.softmax(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    return np.einsum("nts,snv,nvd->td", weights, value, p["output"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_what_the_paper_says(variant):
    settings = model(variant)
    layer, parameters, x_BTD = call(settings)
    made = np.asarray(jax.jit(layer)(parameters, x_BTD))
    for row, part in ((0, slice(0, 7)), (0, slice(7, T)), (1, slice(0, T))):
        expected = written_out(settings, parameters, x_BTD[row, part])
        # Float32 sums of products of a few hundred numbers.
        np.testing.assert_allclose(made[row, part], expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def plain_attention(query_BTNH, view, *, scale=None, value_dim=None, reach=None):
    """Attention in the dtype of its operands, which the kernels' has float32 sums of."""
    key, value = view.arrays["key"], view.arrays.get("value", view.arrays["key"][..., :value_dim])
    key, value = (jnp.repeat(x, query_BTNH.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query_BTNH, key) * (scale or query_BTNH.shape[-1] ** -0.5)
    index = jnp.arange(T)[None, None, None]
    start, end = (jnp.asarray(x)[:, None, :, None] for x in view.key_range)
    return jnp.einsum(
        "bnts,bsnv->btnv", jax.nn.softmax(jnp.where((start <= index) & (index < end), scores, -jnp.inf)), value
    )


@pytest.mark.parametrize("dtype, relative", [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_absorbed_it_is_the_same(variant, dtype, relative, monkeypatch):
    settings = model(variant)
    layer, parameters, x_BTD = call(settings, dtype)
    if dtype == "float64":
        monkeypatch.setattr(latent, "attention", plain_attention)
    with jax.enable_x64(dtype == "float64"):
        form = jax.jit(
            lambda is_whole: layer(parameters, x_BTD, OwnTokens() if is_whole else KeptTokens()), static_argnums=0
        )
        whole, absorbed = (np.asarray(form(is_whole)) for is_whole in (True, False))
    assert whole.dtype == absorbed.dtype == dtype
    assert np.abs(absorbed - whole).max() <= relative * np.abs(whole).max()


def test_gradients_reach_everything_through_the_latents(monkeypatch):
    """Central differences along a random direction of each parameter; float64, so that they have digits."""
    monkeypatch.setattr(latent, "attention", plain_attention)
    layer, parameters, x_BTD = call(model(), "float64")
    with jax.enable_x64(True):
        cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, D)))

        def objective(parameters):
            return jnp.sum(layer(parameters, x_BTD) * cotangent)

        gradients = jax.jit(jax.grad(objective))(parameters)
        value = jax.jit(objective)
        for i, path in enumerate(parameters):
            direction = jnp.asarray(np.random.default_rng(i).standard_normal(parameters[path].shape))
            ends = [value({**parameters, path: parameters[path] + step * direction}) for step in (1e-4, -1e-4)]
            slope = float(jnp.sum(gradients[path] * direction))
            # Norms and rotations are float32 inside: differences have some three digits.
            assert float(ends[0] - ends[1]) / 2e-4 == pytest.approx(slope, rel=1e-2, abs=1e-3), path


@pytest.mark.parametrize(
    "remat",
    sampled(
        [
            pytest.param("full"),
            pytest.param(("latent",), id="latent"),
            pytest.param(("latent", "attention"), id="both"),
        ],
        ["latent"],
    ),
)
def test_rematerialisation_changes_nothing(remat):
    batches = [model_fixtures.batch(seed=i) for i in range(2)]
    (_, expected), _ = model_fixtures.run_steps(model(), model_fixtures.sections(), batches)
    (_, measured), _ = model_fixtures.run_steps(model(), model_fixtures.sections(remat=remat), batches)
    model_fixtures.assert_same_numbers(measured, expected, 2e-5)


def test_remat_keeps_latents_alone():
    """C + R numbers of each token and layer beside the layer's input, which is all that "full" keeps."""
    work = workload("train", model(), 8, 32, remat="full", kernels="xla")
    more = kept(device_step(changed(work, remat=("latent",)))) - kept(device_step(work))
    assert more == 3 * 8 * 32 * (24 + 8) * 2


@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("bfloat16", 2)])
def test_a_token_takes_one_latent_and_one_key(dtype, itemsize):
    """In a plan, in its pages, and in the pages that an engine makes; on each device of a mesh."""
    settings = model(context_length=64)
    work = workload("decode", settings, 4, 64, dtype=dtype, page=32, platform="gpu")
    each = 3 * (24 + 8) * itemsize
    assert kv_bytes_per_token(work) == each
    assert kv_cache(work) == kv_cache(changed(work, layout=meshes.layout(1, 1, 2))) == (4 * 2 + 1) * 32 * each
    programs = EnginePrograms.of(settings, meshes.make(1, 1, 2), jnp.dtype(dtype), EngineSettings(slots=4, page=32))
    in_float32 = 4 // itemsize  # on a CPU
    assert programs.page_bytes == [32 * each * in_float32]
    slots = nnx.merge(*tree.abstract(settings)).slots()
    pages = jax.eval_shape(lambda: PageLayout.of(slots, 32).allocate([5], jnp.dtype(dtype)))
    assert [(name, x.shape) for of in pages.values() for name, x in of.items()] == [("key", (5, 1, 24 + 8, 32))]


def test_microbatches_on_a_mesh_change_nothing():
    expected_losses, expected = model_fixtures.first_gradients(model(), meshes.make())
    losses, gradients = model_fixtures.first_gradients(model(), meshes.make(2, 2, 2), 2)
    model_fixtures.assert_same_numbers(losses, expected_losses, 1e-5)
    model_fixtures.assert_same_numbers(gradients, expected, 1e-4)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rope_dim": 7}, "model.attention.rope_dim = 7: it must be even"),
        ({"rope_dim": 0}, "greater than 0"),
        ({"window": 8}, "Extra inputs"),
        ({"sinks": True}, "Extra inputs"),
        ({"num_kv_heads": 4}, "Extra inputs"),
        ({"latent_rank": None}, "valid integer"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        model_fixtures.model(model_fixtures.LATENT, attention={**SIZES, **changes})


def test_a_mesh_that_does_not_divide_heads_is_refused():
    with pytest.raises(InputError, match="mesh.tensor = 4 does not divide model.attention.num_heads = 6"):
        sizes = mesh_layout.divided_by_mesh(model_fixtures.model(attention={**SIZES, "num_heads": 6}))
        layout_choice.check_divides(meshes.layout(1, 1, 4), TRAIN, sizes)


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, chips, sizes",
    [
        ("train", "h200-sxm:4", (1, 2, 2)),
        ("decode", "h200-sxm:4", (2, 1, 2)),
        ("prefill", "h200-sxm:4", (2, 1, 2)),
        ("train", "tpu-v5e:2x2", (1, 2, 2)),
        ("decode", "tpu-v5e:2x2", (1, 1, 4)),
        ("prefill", "tpu-v5e:2x2", (1, 1, 4)),
    ],
    ids=str,
)
def test_compiled_programs_are_as_counted(kind, chips, sizes):
    """Products to the last FLOP, and what is gathered and scattered, but for the gradient of the shared key, of
    rope_dim channels, which is not counted."""
    wide = {"num_heads": 8, "query_rank": 192, "latent_rank": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
    settings = model(d_model=512, context_length=1024, vocab_size=2048, attention={**SIZES, **wide})
    experiment = model_fixtures.experiment(settings, batch=16, sequence=1024, dtype="bfloat16")
    target = Target.parse(chips)
    mesh = make_mesh(meshes.layout(*sizes), targets.devices(target))
    found = report.compile(experiment, kind, target, mesh, False).report
    assert found.flops == found.counted_flops
    if kind == "prefill":  # a kernel declares all pages of the rows that decode, which are padding and see none
        assert found.counted_kernel_flops < found.kernel_flops < 1.02 * found.counted_kernel_flops
    else:
        assert found.kernel_flops == pytest.approx(found.counted_kernel_flops, rel=1e-9)  # shared out as floats
    if kind == "train":
        sent, counted = Counter(), Counter()
        for each in found.collectives:
            sent[each.kind, each.axes] += each.count * each.bytes
        for each in traffic.collectives(found.work):
            counted[each.kind, each.axes] += each.times * each.bytes
        for key in (("all-gather", ("fsdp",)), ("all-gather", ("tensor",)), ("reduce-scatter", ("fsdp",))):
            assert sent[key] == counted[key]
        key, rope_key = ("reduce-scatter", ("tensor",)), 3 * 8 * 1024 * 32 * 2
        assert sent[key] == counted[key] + rope_key
