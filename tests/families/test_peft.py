"""Adapters in the format of PEFT: written through the table of each family, read again, and opened in PEFT."""

import json
import shutil
from pathlib import Path

import jax
import loud
import meshes
import numpy as np
import pytest
from flax import nnx
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.families import peft, safetensors
from jaxlm.families.directory import PublishedModel
from jaxlm.families.safetensors import LazyTensor
from jaxlm.models import tree
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.positions import packed_causal_mask
from jaxlm.parallel.rules import TRAIN

STORIES = Path(__file__).parent / "stories260K"


def published(folder, name):
    """Write a fixture's loud weights as a directory, and return its model."""
    facts, _ = loud.read(name)
    folder.mkdir()
    tensors = {key: LazyTensor(x.dtype, x.shape, lambda x=x: x) for key, x in loud.weights(facts, "loud").items()}
    safetensors.write(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(facts["config"]))
    return PublishedModel(folder)


def drawn(model, lora):
    """Return random adapters of a model."""
    adapters, _ = tree.trained(tree.abstract(model, lora)[1])
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: draw.normal(0, 0.2, x.shape).astype(np.float32), tree.shapes(adapters))


def summed(parameters, adapters, scale):
    """Return parameters by path, with adapters added by numpy."""
    leaves, parts = tree.paths(parameters), tree.paths(adapters)
    for path in {path.removesuffix("/a") for path in parts if path.endswith("/a")}:
        a, b = parts[f"{path}/a"], parts[f"{path}/b"]
        layers, rank = len(a), a.shape[-1]
        product = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
        leaves[path] = np.asarray(leaves[path]) + scale * product.reshape(leaves[path].shape)
    return leaves


TARGETS = {"all": ("*",), "values": ("*/attention/value", "*/attention/output"), "gates": ("*/up", "*/query")}


@pytest.mark.parametrize(
    "name, targets",
    sampled(
        [pytest.param(name, targets) for name in loud.names() for targets in TARGETS],
        ["phi3-values", "glm4-all", "gpt2-gates"],
    ),
)
def test_adapters_come_back_as_they_were(tmp_path, name, targets):
    """Through fused tensors, interleaved rotary pairs and matrices stored [in, out]. The sum of both forms is equal to
    the rounding of a float32 product."""
    model = published(tmp_path / "base", name)
    paths = TARGETS[targets]
    if any(layer.feed_forward.kind == "mixture" for layer in model.model.layers):
        paths = tuple(path for path in paths if path != "*/up")  # of experts, which have no adapters
    lora = LoraConfig(rank=3, alpha=6.0, targets=paths, rank_stabilized=targets == "gates")
    adapters = drawn(model.model, lora)
    base = {"base_model_name_or_path": "../base"}
    numbers = peft.write(tmp_path / "adapter", model.model, model.family, lora, adapters, base)
    assert numbers >= sum(leaf.size for leaf in jax.tree.leaves(adapters))  # zeros between blocks are numbers too
    mesh = meshes.make()
    expected = summed(model.load(mesh, TRAIN, "float32"), adapters, lora.scale)
    there = tree.paths(peft.AdaptedModel(tmp_path / "adapter").load(mesh, TRAIN, "float32"))
    beside = peft.PeftAdapter(tmp_path / "adapter").matrices(peft.AdapterBase.of(model))
    parts = {f"{path}/{factor}": part for path, pair in beside.items() for factor, part in zip("ab", pair, strict=True)}
    assert parts.keys() == tree.paths(adapters).keys()
    assert all(len(b[0]) == lora.rank for _, b in beside.values())
    apart = summed(model.load(mesh, TRAIN, "float32"), jax.tree.map(np.asarray, parts), 1.0)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] == name.startswith("gpt2")  # whose matrices are stored [in, out]
    for path, leaf in expected.items():
        for found in (there, apart):
            np.testing.assert_allclose(found[path], leaf, atol=1e-5 * np.abs(leaf).max(), err_msg=path)


def test_adapters_of_experts_are_refused(tmp_path):
    """Square ones too: their adapters would fit turned."""
    facts, _ = loud.read("mixtral")
    model = published(tmp_path / "base", "mixtral")
    lora = LoraConfig(rank=3, targets=("*/query",))
    peft.write(tmp_path / "adapter", model.model, model.family, lora, drawn(model.model, lora), {})
    matrix = "model.layers.0.block_sparse_moe.experts.0.w1"
    outputs, inputs = facts["tensors"][f"{matrix}.weight"]
    shapes = {"A": (3, outputs), "B": (inputs, 3)}
    tensors = {
        f"base_model.model.{matrix}.lora_{factor}.weight": LazyTensor(
            np.dtype(np.float32), shape, lambda shape=shape: np.ones(shape, np.float32)
        )
        for factor, shape in shapes.items()
    }
    safetensors.write(tmp_path / "adapter" / "adapter_model.safetensors", tensors, {})
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="is the adapter of no matrix of"):
        peft.AdaptedModel(tmp_path / "adapter").load(meshes.make(), TRAIN, "float32")


def test_a_fused_tensor_has_a_rank_and_an_alpha_of_its_own(tmp_path):
    model = published(tmp_path / "base", "phi3")
    lora = LoraConfig(rank=4, alpha=8.0)
    peft.write(tmp_path / "adapter", model.model, model.family, lora, drawn(model.model, lora), {})
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["rank_pattern"] == {"gate_up_proj": 8, "qkv_proj": 12}
    assert config["alpha_pattern"] == {"gate_up_proj": 16, "qkv_proj": 24}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A directory with an adapter of stories260K."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    model, lora = PublishedModel(STORIES), LoraConfig(rank=2)
    base = {"base_model_name_or_path": str(STORIES)}
    peft.write(folder, model.model, model.family, lora, drawn(model.model, lora), base)
    return folder


CHANGED = {
    "use_dora": (True, "use_dora = True: jaxlm reads adapters without it"),
    "bias": ("all", "bias = 'all': jaxlm reads adapters without it"),
    "modules_to_save": (["lm_head"], "modules_to_save = ['lm_head']: jaxlm reads adapters without it"),
    "init_lora_weights": ("pissa", "init_lora_weights = 'pissa'"),
    "something_new": (3, "something_new = 3"),
    "peft_type": ("IA3", "peft_type = 'IA3', and jaxlm reads LORA"),
    "base_model_name_or_path": ("/gone", "adapts '/gone', which is no Hugging Face directory; set base_model_name_or"),
    "lora_alpha": ("much", "lora_alpha and alpha_pattern give model.layers.0"),
    "alpha_pattern": ({"(": 3}, "lora_alpha and alpha_pattern give model.layers.0"),
}


@pytest.mark.parametrize("key", CHANGED)
def test_what_changes_a_result_and_is_not_read_is_refused(adapter, tmp_path, key):
    value, message = CHANGED[key]
    shutil.copytree(adapter, tmp_path / "changed")
    file = tmp_path / "changed" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(InputError) as refused:
        assert peft.AdaptedModel(tmp_path / "changed").tensors  # noqa: B018
    assert message in str(refused.value) and "\n" not in str(refused.value)


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


def _half(arrays):
    del arrays[f"{QUERY}.lora_B.weight"]


def _of_no_matrix(arrays):
    arrays["base_model.model.model.norm.lora_A.weight"] = arrays.pop(f"{QUERY}.lora_A.weight")


def _narrower(arrays):
    arrays[f"{QUERY}.lora_A.weight"] = np.zeros((2, 63), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_half, "q_proj.weight is A [2, 64], and should be A [r, 64], B [64, r]"),
        (_of_no_matrix, "model.norm.lora_A.weight is the adapter of no matrix of"),
        (_narrower, "q_proj.weight is A [2, 63], B [64, 2], and should be A [r, 64], B [64, r]"),
    ],
)
def test_a_broken_adapter_is_refused(adapter, tmp_path, change, message):
    stored = safetensors.read_header(adapter / "adapter_model.safetensors")
    arrays = {name: np.array(tensor.read()) for name, tensor in stored.items()}
    change(arrays)
    shutil.copytree(adapter, tmp_path / "broken")
    tensors = {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in arrays.items()}
    safetensors.write(tmp_path / "broken" / "adapter_model.safetensors", tensors, {})
    with pytest.raises(InputError) as refused:
        assert peft.AdaptedModel(tmp_path / "broken").tensors  # noqa: B018
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(loud.names(), ["phi3"]))
def test_peft_opens_them_with_the_same_logits(tmp_path, name):
    """If it is installed, with transformers, to 2e-5 of the largest logit."""
    pytest.importorskip("peft")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from peft import PeftModel

    model, lora = published(tmp_path / "base", name), LoraConfig(rank=3, alpha=6.0)
    adapters, mesh = drawn(model.model, lora), meshes.make()
    base = {"base_model_name_or_path": str(tmp_path / "base")}
    peft.write(tmp_path / "adapter", model.model, model.family, lora, adapters, base)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    ids = np.asarray(loud.read(name)[0]["sequences"][:1])
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(opened, tmp_path / "adapter")(torch.from_numpy(ids)).logits.numpy()
    parameters = peft.AdaptedModel(tmp_path / "adapter").load(mesh, TRAIN, "float32")
    module = nnx.merge(tree.abstract(model.model)[0], parameters)
    positions = jax.numpy.arange(ids.shape[1])[None]
    ours = module.logits(module.hidden(jax.numpy.asarray(ids), positions, packed_causal_mask(positions))[0])
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())
