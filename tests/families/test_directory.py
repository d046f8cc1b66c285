"""Hugging Face directories whose names are others than those of the family's rules."""

import json

import loud
import numpy as np
import pytest
from running import save

from jaxlm.families.directory import PublishedModel


def directory(folder, config, tensors):
    """Write a directory with these tensors."""
    folder.mkdir()
    return PublishedModel(save(folder, config, tensors))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_of_pictures_is_read_alone(tmp_path, prefix):
    facts, _ = loud.read("gemma3")
    weights = loud.weights(facts, "loud")
    text = directory(tmp_path / "text", facts["config"], weights)
    nested = {"model_type": "gemma3", "text_config": facts["config"], "vision_config": {}}
    named = {prefix + name.removeprefix("model."): x for name, x in weights.items()}
    both = directory(tmp_path / "both", nested, named | {"vision_tower.x": np.zeros(3, np.float32)})
    assert both.model == text.model and both.dropped == ["vision_tower.x"]
    assert both.tensors == text.tensors
    for name, tensor in text.stored.items():
        np.testing.assert_array_equal(tensor.read(), both.stored[name].read())


def test_old_files_of_gpt2_have_the_names_of_the_base_model(tmp_path):
    facts, _ = loud.read("gpt2")
    weights = loud.weights(facts, "loud")
    old = {name.removeprefix("transformer."): x for name, x in weights.items()}
    masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 4, 4), np.float32) for layer in range(3)}
    found = directory(tmp_path / "old", facts["config"], old | masks)
    assert found.tensors.keys() == weights.keys() and len(found.dropped) == 3


def test_a_copy_of_a_tied_table_is_compared(tmp_path):
    facts, _ = loud.read("gpt2")
    weights = loud.weights(facts, "loud")
    table = weights["transformer.wte.weight"]
    same = directory(tmp_path / "same", facts["config"], weights | {"lm_head.weight": table})
    assert same.tensors and same.dropped == ["lm_head.weight"]
    other = directory(tmp_path / "other", facts["config"], weights | {"lm_head.weight": table + 1})
    with pytest.raises(ValueError, match="lm_head.weight is not transformer.wte.weight, and config.json ties them"):
        assert other.tensors


def test_the_one_file_goes_before_an_index_beside_it(tmp_path):
    """A model that was saved in shards before, and then in one file: old weights must not be read."""
    facts, _ = loud.read("llama2")
    new, old = loud.weights(facts, "loud"), loud.weights(facts, "quiet")
    found = directory(tmp_path / "both", facts["config"], new)
    (tmp_path / "shards").mkdir()
    save(tmp_path / "shards", facts["config"], old)
    shard = "model-00001-of-00001.safetensors"
    (tmp_path / "shards" / "model.safetensors").rename(tmp_path / "both" / shard)
    index = tmp_path / "both" / "model.safetensors.index.json"
    for weight_map in (dict.fromkeys(new, shard), dict.fromkeys(new, "model-00001-of-00002.safetensors")):
        index.write_text(json.dumps({"weight_map": weight_map}))
        found = PublishedModel(tmp_path / "both")
        for name, tensor in found.stored.items():
            np.testing.assert_array_equal(tensor.read(), new[name])
        assert "model.safetensors is read, and not model.safetensors.index.json beside it" in "\n".join(found.remarks())
    (tmp_path / "both" / "model.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(new, shard)}))
    alone = PublishedModel(tmp_path / "both").stored
    np.testing.assert_array_equal(alone["model.norm.weight"].read(), old["model.norm.weight"])


@pytest.mark.parametrize(("name", "prefix"), [("llama2", "model."), ("gpt_neox", "gpt_neox."), ("qwen3", "model.")])
def test_files_of_the_model_without_its_head_have_names_without_its_prefix(tmp_path, name, prefix):
    facts, _ = loud.read(name)
    weights = loud.weights(facts, "loud")
    bare = directory(tmp_path / "bare", facts["config"], {key.removeprefix(prefix): x for key, x in weights.items()})
    assert bare.tensors.keys() == weights.keys()
    for key, tensor in bare.stored.items():
        np.testing.assert_array_equal(tensor.read(), weights[key])
    both = {**weights, "norm.weight": weights.get("model.norm.weight", np.zeros(3, np.float32))}
    if prefix == "model.":
        with pytest.raises(ValueError, match="has model.norm.weight and norm.weight, which are two names of one"):
            _ = directory(tmp_path / "both", facts["config"], both).stored
