import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import meshes
import model_fixtures
import numpy as np
import pytest
from flax import nnx

from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.parameters import param, zeros

MODELS = Path(__file__).parents[2] / "configs" / "models"

# From the models' published weights.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "ministral-8b": 8_019_808_256,
    "pythia-160m": 162_322_944,
    "pythia-6.9b": 6_857_302_016,
    "glm4-9b": 9_400_279_040,
    "command-r7b": 8_028_033_024,
    "exaone4-32b": 32_003_216_384,
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
    "seed-oss-36b": 36_151_104_512,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "afm-4.5b": 4_619_184_640,
    "nanochat-d20": 560_988_160,
    "nanochat-d32": 1_879_048_192,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "mamba2-2.7b": 2_702_599_680,
    "codestral-mamba-7b": 7_285_403_648,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "nemotron3-nano-30b-a3b": 31_577_937_344,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_929_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.5-air": 106_852_245_504,
    "minimax-m2": 228_689_748_992,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    # With what sees pictures 4,300,079,472 and 27,432,406,640: the same 416,866,032 beside a projection and its norm.
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2560 - 1152,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5376 - 1152,
}


def published(name: str) -> ModelConfig:
    return ModelConfig(**tomllib.loads((MODELS / f"{name}.toml").read_text())["model"])


def test_every_published_model_has_its_count_here():
    assert {path.stem for path in MODELS.glob("*.toml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert tree.parameter_count(published(name)) == PUBLISHED[name]


def test_405b_is_abstract_within_two_seconds():
    model = published("llama3.1-405b")
    began = time.perf_counter()
    _, abstract = tree.abstract(model)
    leaves = jax.tree.leaves(tree.shapes(abstract))
    assert time.perf_counter() - began < 2.0
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


@pytest.mark.exhaustive  # tests/costs/jaxpr/test_count.py asks for no backend, and has the tree of a step
def test_the_abstract_tree_starts_no_backend():
    code = (
        "from jax._src import xla_bridge; from jaxlm.models.config import ModelConfig; from jaxlm.models import tree;"
        f"import tomllib; text = open({str(MODELS / 'llama3.1-405b.toml')!r}).read();"
        "tree.parameter_count(ModelConfig(**tomllib.loads(text)['model']));"
        "assert not xla_bridge._backends, xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def without(axes, *paths):
    return {path: names for path, names in axes.items() if path not in paths}


GOLDEN_AXES = {
    "gpt2": {
        "embedding": "vocab embed",
        "final_norm/bias": "channels",
        "final_norm/scale": "channels",
        "layers/attention/key": "layers embed kv_heads head_dim",
        "layers/attention/key_bias": "layers kv_heads head_dim",
        "layers/attention/output": "layers heads head_dim embed",
        "layers/attention/output_bias": "layers channels",
        "layers/attention/query": "layers embed heads head_dim",
        "layers/attention/query_bias": "layers heads head_dim",
        "layers/attention/value": "layers embed kv_heads head_dim",
        "layers/attention/value_bias": "layers kv_heads head_dim",
        "layers/attention_norm/bias": "layers channels",
        "layers/attention_norm/scale": "layers channels",
        "layers/feed_forward/down": "layers feed_forward embed",
        "layers/feed_forward/down_bias": "layers channels",
        "layers/feed_forward/up": "layers embed feed_forward",
        "layers/feed_forward/up_bias": "layers feed_forward",
        "layers/feed_forward_norm/bias": "layers channels",
        "layers/feed_forward_norm/scale": "layers channels",
        "positions": "positions embed",
    },
    "llama": {
        "embedding": "vocab embed",
        "final_norm/scale": "channels",
        "layers/attention/key": "layers embed kv_heads head_dim",
        "layers/attention/output": "layers heads head_dim embed",
        "layers/attention/query": "layers embed heads head_dim",
        "layers/attention/value": "layers embed kv_heads head_dim",
        "layers/attention_norm/scale": "layers channels",
        "layers/feed_forward/down": "layers feed_forward embed",
        "layers/feed_forward/gate": "layers embed feed_forward",
        "layers/feed_forward/up": "layers embed feed_forward",
        "layers/feed_forward_norm/scale": "layers channels",
        "unembedding": "embed vocab",
    },
}
GOLDEN_AXES["qwen3"] = {
    **{path: axes for path, axes in GOLDEN_AXES["llama"].items() if path != "unembedding"},
    "layers/attention/query_norm/scale": "layers head_dim",
    "layers/attention/key_norm/scale": "layers head_dim",
}
GOLDEN_AXES["gemma2"] = {
    **{path: axes for path, axes in GOLDEN_AXES["llama"].items() if path != "unembedding"},
    "layers/attention_post_norm/scale": "layers channels",
    "layers/feed_forward_post_norm/scale": "layers channels",
}
GOLDEN_AXES["gemma3"] = GOLDEN_AXES["gemma2"] | GOLDEN_AXES["qwen3"]
GOLDEN_AXES["mistral"] = GOLDEN_AXES["phi"] = GOLDEN_AXES["llama"]
TIED = {path: axes for path, axes in GOLDEN_AXES["llama"].items() if path != "unembedding"}
GOLDEN_AXES |= dict.fromkeys(("llama3.2", "gemma-", "smollm3"), TIED)
GOLDEN_AXES["qwen3-32b"] = GOLDEN_AXES["qwen3"] | GOLDEN_AXES["llama"]
BIASES = {
    "layers/attention/query_bias": "layers heads head_dim",
    "layers/attention/key_bias": "layers kv_heads head_dim",
    "layers/attention/value_bias": "layers kv_heads head_dim",
}
GOLDEN_AXES |= {"qwen2.5-1.5b": TIED | BIASES, "qwen2.5-7b": GOLDEN_AXES["llama"] | BIASES}
GOLDEN_AXES["olmo"] = {
    **{path: axes for path, axes in GOLDEN_AXES["llama"].items() if not path.endswith("_norm/scale")},
    "final_norm/scale": "channels",
    "layers/attention/query_norm/scale": "layers heads head_dim",
    "layers/attention/key_norm/scale": "layers kv_heads head_dim",
    "layers/attention_post_norm/scale": "layers channels",
    "layers/feed_forward_post_norm/scale": "layers channels",
}
UNGATED = without(GOLDEN_AXES["llama"], "layers/feed_forward/gate")
LAYER_NORMED = without(GOLDEN_AXES["gpt2"], "positions")
POST_NORMS = {f"layers/{part}_post_norm/scale": "layers channels" for part in ("attention", "feed_forward")}
QK_NORMS = {f"layers/attention/{part}_norm/scale": "layers head_dim" for part in ("query", "key")}
BEFORE = ("layers/attention_norm/scale", "layers/feed_forward_norm/scale")
GOLDEN_AXES |= {
    "ministral": GOLDEN_AXES["llama"],
    "pythia": LAYER_NORMED | {"unembedding": "embed vocab"},
    "glm4": GOLDEN_AXES["llama"] | BIASES | POST_NORMS,
    "command": without(TIED, "layers/feed_forward_norm/scale"),
    "exaone4": without(GOLDEN_AXES["llama"], *BEFORE) | POST_NORMS | QK_NORMS,
    "granite": TIED,
    "seed": GOLDEN_AXES["llama"] | BIASES,
    "starcoder2": LAYER_NORMED,
    "afm": UNGATED,
    "nanochat": {path: axes for path, axes in UNGATED.items() if "norm" not in path},
}
EXPERTS = {
    "layers/feed_forward/router": "layers embed routes",
    "layers/feed_forward/gate": "layers experts feed_forward embed",
    "layers/feed_forward/up": "layers experts feed_forward embed",
    "layers/feed_forward/down": "layers experts embed feed_forward",
}
GOLDEN_AXES |= {
    "mixtral": GOLDEN_AXES["llama"] | EXPERTS,
    "olmoe": GOLDEN_AXES["llama"]
    | EXPERTS
    | {
        "layers/attention/query_norm/scale": "layers heads head_dim",
        "layers/attention/key_norm/scale": "layers kv_heads head_dim",
    },
    "qwen3-30b": GOLDEN_AXES["qwen3-32b"] | EXPERTS,
    "qwen3-235b": GOLDEN_AXES["qwen3-32b"] | EXPERTS,
    "gpt-oss": GOLDEN_AXES["llama"]
    | EXPERTS
    | {
        "layers/attention/query_bias": "layers heads head_dim",
        "layers/attention/key_bias": "layers kv_heads head_dim",
        "layers/attention/value_bias": "layers kv_heads head_dim",
        "layers/attention/output_bias": "layers channels",
        "layers/attention/sinks": "layers heads",
        "layers/feed_forward/router_bias": "layers routes",
        "layers/feed_forward/gate_bias": "layers experts feed_forward",
        "layers/feed_forward/up_bias": "layers experts feed_forward",
        "layers/feed_forward/down_bias": "layers experts channels",
    },
}
CHOSEN = EXPERTS | {"layers/feed_forward/selection_bias": "layers routes"}
SHARED = {
    "layers/feed_forward/shared/gate": "layers embed feed_forward",
    "layers/feed_forward/shared/up": "layers embed feed_forward",
    "layers/feed_forward/shared/down": "layers feed_forward embed",
}


def stacked(axes, name):
    """The axes of a stack with a name."""
    return {path.replace("layers/", f"layers/{name}/", 1): names for path, names in axes.items()}


GOLDEN_AXES |= {
    "glm-4.5": stacked(GOLDEN_AXES["llama"] | BIASES, "dense")
    | stacked(GOLDEN_AXES["llama"] | BIASES | CHOSEN | SHARED, "mixture"),
    "minimax": GOLDEN_AXES["olmoe"] | CHOSEN,
}
LATENT = without(GOLDEN_AXES["llama"], "layers/attention/query", "layers/attention/key", "layers/attention/value") | {
    "layers/attention/query_latent": "layers embed latent",
    "layers/attention/query_norm/scale": "layers latent",
    "layers/attention/query_from_latent": "layers latent heads head_dim",
    "layers/attention/latent": "layers embed latent",
    "layers/attention/latent_norm/scale": "layers latent",
    "layers/attention/rope_key": "layers embed head_dim",
    "layers/attention/key": "layers latent heads head_dim",
    "layers/attention/value": "layers latent heads head_dim",
}
LITE = without(
    LATENT,
    "layers/attention/query_latent",
    "layers/attention/query_norm/scale",
    "layers/attention/query_from_latent",
) | {"layers/attention/query": "layers embed heads head_dim"}
GOLDEN_AXES |= {
    "deepseek-v2": stacked(LATENT, "dense") | stacked(LATENT | EXPERTS | SHARED, "mixture"),
    "deepseek-v2-lite": stacked(LITE, "dense") | stacked(LITE | EXPERTS | SHARED, "mixture"),
    "deepseek-v3": stacked(LATENT, "dense") | stacked(LATENT | CHOSEN | SHARED, "mixture"),
}
DELTA = {
    **dict.fromkeys(("layers/attention/query", "layers/attention/key"), "layers embed heads head_dim"),
    **dict.fromkeys(("layers/attention/value", "layers/attention/gate"), "layers embed heads head_dim"),
    **dict.fromkeys(("layers/attention/beta", "layers/attention/time"), "layers embed heads"),
    "layers/attention/query_taps": "layers taps heads head_dim",
    "layers/attention/key_taps": "layers taps heads head_dim",
    "layers/attention/value_taps": "layers taps heads head_dim",
    **dict.fromkeys(("layers/attention/log_rate", "layers/attention/time_bias"), "layers heads"),
    "layers/attention/output_norm/scale": "layers head_dim",
    "layers/attention/output": "layers heads head_dim embed",
}
NEXT = GOLDEN_AXES["qwen3-30b"] | SHARED | {"layers/feed_forward/shared_gate": "layers embed shared_gate"}
WITHOUT = without(NEXT, *(path for path in NEXT if path.startswith("layers/attention/")))
CONVOLUTION = {
    **dict.fromkeys(("layers/attention/value", "layers/attention/gate"), "layers embed feed_forward"),
    "layers/attention/input_gate": "layers embed feed_forward",
    "layers/attention/taps": "layers taps feed_forward",
    "layers/attention/output": "layers feed_forward embed",
}
LFM2 = without(GOLDEN_AXES["qwen3-32b"], "unembedding")


def convolved(axes):
    """The axes of a layer with a short convolution in place of attention."""
    return without(axes, *(path for path in axes if path.startswith("layers/attention/"))) | CONVOLUTION


GOLDEN_AXES |= {
    "lfm2-1.2b": stacked(convolved(LFM2), "convolution") | stacked(LFM2, "full"),
    "lfm2-8b": stacked(convolved(LFM2), "convolution_dense")
    | stacked(convolved(LFM2 | CHOSEN), "convolution_mixture")
    | stacked(LFM2 | CHOSEN, "full_mixture"),
    "qwen3-next": stacked(WITHOUT | DELTA, "delta")
    | stacked(NEXT | {"layers/attention/gate": "layers embed heads head_dim"}, "full"),
}
MAMBA = {
    **dict.fromkeys(("layers/attention/query", "layers/attention/key"), "layers embed kv_heads head_dim"),
    **dict.fromkeys(("layers/attention/value", "layers/attention/gate"), "layers embed heads head_dim"),
    "layers/attention/time": "layers embed heads",
    **dict.fromkeys(("layers/attention/query_taps", "layers/attention/key_taps"), "layers taps kv_heads head_dim"),
    "layers/attention/value_taps": "layers taps heads head_dim",
    **dict.fromkeys(("layers/attention/query_taps_bias", "layers/attention/key_taps_bias"), "layers kv_heads head_dim"),
    "layers/attention/value_taps_bias": "layers heads head_dim",
    **dict.fromkeys(("layers/attention/log_rate", "layers/attention/time_bias"), "layers heads"),
    "layers/attention/skip": "layers heads",
    "layers/attention/output_norm/scale": "layers heads head_dim",
    "layers/attention/output": "layers heads head_dim embed",
}
ALONE = {"embedding": "vocab embed", "final_norm/scale": "channels", "layers/attention_norm/scale": "layers channels"}
GOLDEN_AXES |= {"mamba2": ALONE | MAMBA, "codestral": ALONE | MAMBA | {"unembedding": "embed vocab"}}
GOLDEN_AXES["qwen3.5"] = GOLDEN_AXES["qwen3-next"]
FULL = GOLDEN_AXES["qwen3-32b"]
GOLDEN_AXES["qwen3.5-27b"] = stacked(
    without(FULL, *(path for path in FULL if path.startswith("layers/attention/"))) | DELTA, "delta"
) | stacked(FULL | {"layers/attention/gate": "layers embed heads head_dim"}, "full")
ATTENTION = {path: axes for path, axes in GOLDEN_AXES["llama"].items() if not path.startswith("layers/feed_forward")}
GOLDEN_AXES["nemotron3"] = (
    stacked(GOLDEN_AXES["codestral"], "state_space")
    | stacked(ATTENTION, "full")
    | stacked(
        without(CHOSEN | SHARED, "layers/feed_forward/gate", "layers/feed_forward/shared/gate")
        | {"layers/feed_forward_norm/scale": "layers channels"},
        "mixture",
    )
)
# Sizes of a family differ in nothing else.
FAMILIES = {name: family for family in GOLDEN_AXES for name in PUBLISHED if name.startswith(family)}


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"qwen3-8b"}))
def test_logical_axes(name):
    _, abstract = tree.abstract(published(name))
    axes = tree.paths(tree.read(abstract, lambda leaf: " ".join(leaf.axes)))
    assert axes == GOLDEN_AXES[FAMILIES[name]]


def test_matrices_are_what_the_axes_say_not_what_has_two_dimensions():
    _, abstract = tree.abstract(model_fixtures.model(model_fixtures.GPT2))
    dimensions = tree.paths(tree.dimensions(abstract))
    vectors = {path for path, parameter in dimensions.items() if not parameter.inputs}
    assert vectors == {path for path in dimensions if path.endswith(("scale", "bias"))}


def test_initial_values_do_not_depend_on_the_mesh_and_each_device_holds_only_its_shard():
    model = model_fixtures.model()
    one = tree.init(model, 0, meshes.make())
    eight = tree.init(model, 0, meshes.make(data=2, fsdp=2, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, one, eight)
    up = eight["layers"]["feed_forward"]["up"]
    assert up.shape == (3, 32, 48)
    assert {shard.data.shape for shard in up.addressable_shards} == {(3, 16, 24)}


def test_another_seed_makes_other_values_and_layers_are_not_copies_of_one_another():
    mesh = meshes.make()
    a, b = (tree.init(model_fixtures.model(), seed, mesh) for seed in (0, 1))
    assert not np.array_equal(a["embedding"], b["embedding"])
    query = np.asarray(a["layers"]["attention"]["query"])
    assert not np.array_equal(query[0], query[1])


def test_initial_spread():
    model = model_fixtures.model(d_model=128, initializer_std=0.02)
    parameters = jax.device_get(tree.init(model, 0, meshes.make()))
    # 49,152 draws: the sample's deviation is within 2 % by six sigma.
    np.testing.assert_allclose(np.std(parameters["layers"]["feed_forward"]["up"][0]), 0.02, rtol=0.06)
    residual = np.std(parameters["layers"]["feed_forward"]["down"])
    np.testing.assert_allclose(residual, 0.02 / np.sqrt(2 * model.num_layers), rtol=0.06)


def test_axes_must_name_every_dimension():
    with pytest.raises(ValueError, match="name 2 dimensions; the shape"):
        param(nnx.Rngs(params=0), (2, 3, 4), "embed -> heads", zeros)
