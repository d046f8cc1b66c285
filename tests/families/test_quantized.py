"""Quantized tensors, against formats written out number by number."""

import json

import jax
import loud
import meshes
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxlm.core.errors import InputError
from jaxlm.families import safetensors, table
from jaxlm.families.directory import PublishedModel
from jaxlm.families.family import families
from jaxlm.families.quantized import check_method, dequantized, quantization
from jaxlm.families.safetensors import LazyTensor, read_header
from jaxlm.families.settings import model_of
from jaxlm.models import lora, tree
from jaxlm.models.quantize_config import Quantization
from jaxlm.parallel.rules import TRAIN

QUANTIZED = ("_proj.weight", "_proj_with_mqa.weight")  # the last of DeepSeek's, whose rows end within a block


def stored(folder, arrays):
    """Write arrays into a file and read its header."""
    tensors = {name: LazyTensor(x.dtype, x.shape, lambda x=x: x) for name, x in arrays.items()}
    safetensors.write(folder / "x.safetensors", tensors, {})
    return read_header(folder / "x.safetensors")


def in_blocks(x, scales, block):
    """Return numbers times the scale of their block, one by one."""
    found = np.empty(x.shape, np.float32)
    for index in np.ndindex(*x.shape):
        *outer, row, column = index
        found[index] = np.float32(x[index]) * np.float32(scales[(*outer, row // block[0], column // block[1])])
    return found.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("shape, block", [((37, 70), (8, 32)), ((3, 16, 33), (16, 16)), ((5, 256), (64, 128))])
def test_fp8_numbers_are_times_the_scale_of_their_block(tmp_path, shape, block, scale_dtype):
    random = np.random.default_rng(0)
    values = random.standard_normal(shape, np.float32).astype(ml_dtypes.float8_e4m3fn)
    *outer, rows, columns = shape
    grid = (*outer, -(-rows // block[0]), -(-columns // block[1]))
    scales = (2.0 ** random.integers(-5, 5, grid) * random.uniform(1, 2, grid)).astype(scale_dtype)
    other = np.ones((2, 3), ml_dtypes.bfloat16)
    found = dequantized(stored(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales, "b.weight": other}))
    assert found.keys() == {"a.weight", "b.weight"}
    assert (found["a.weight"].dtype_name, found["a.weight"].shape) == ("BF16", shape)
    np.testing.assert_array_equal(found["a.weight"].read(), in_blocks(values, scales, block))
    np.testing.assert_array_equal(found["b.weight"].read(), other)


def test_exponents_in_bytes_are_scales(tmp_path):
    values = np.array([[1.0, -2.0], [3.5, 0.25]], ml_dtypes.float8_e4m3fn)
    found = dequantized(stored(tmp_path, {"w": values, "w_scale_inv": np.array([[130]], np.uint8)}))
    np.testing.assert_array_equal(found["w"].read().astype(np.float32), [[8.0, -16.0], [28.0, 2.0]])


def test_one_scale_holds_for_all_and_those_of_activations_are_left(tmp_path):
    values = np.array([[1.0, -2.0], [3.5, 0.25]], ml_dtypes.float8_e4m3fn)
    arrays = {"w.weight": values, "w.weight_scale_inv": np.float32(0.5), "w.activation_scale": np.float32(3)}
    found = dequantized(stored(tmp_path, {name: np.asarray(x) for name, x in arrays.items()}))
    assert found.keys() == {"w.weight"}
    np.testing.assert_array_equal(found["w.weight"].read().astype(np.float32), [[0.5, -1.0], [1.75, 0.125]])


def test_mxfp4_has_two_numbers_in_a_byte_the_first_in_its_low_half(tmp_path):
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2, 3, 4, 16), np.uint8)
    scales = random.integers(120, 132, (2, 3, 4), np.uint8)
    found = dequantized(stored(tmp_path, {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}))
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers += [-x for x in numbers]
    expected = np.empty((2, 128, 3), np.float32)
    for e, row, block, byte in np.ndindex(*blocks.shape):
        both, scale = int(blocks[e, row, block, byte]), 2.0 ** (int(scales[e, row, block]) - 127)
        expected[e, 32 * block + 2 * byte, row] = numbers[both % 16] * scale
        expected[e, 32 * block + 2 * byte + 1, row] = numbers[both // 16] * scale
    assert found.keys() == {"e.down_proj"} and found["e.down_proj"].shape == (2, 128, 3)
    np.testing.assert_array_equal(found["e.down_proj"].read().astype(np.float32), expected)


def test_experts_in_mxfp4_are_those_of_the_dequantized_file(tmp_path):
    """GPT-OSS's gates and what they multiply alternate, in rows of a quantized file and in columns of another."""
    config = loud.read("gpt_oss")[0]["config"] | {"hidden_size": 64, "intermediate_size": 32}
    random, plain, quantized = np.random.default_rng(0), {}, {}
    for name, binding in table.tensors(model_of(config, "gpt_oss"), families()["gpt_oss"].rules).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            plain[name] = quantized[name] = random.standard_normal(binding.shape).astype(ml_dtypes.bfloat16)
            continue
        E, inputs, outputs = binding.shape
        quantized[f"{name}_blocks"] = random.integers(0, 256, (E, outputs, inputs // 32, 16), np.uint8)
        quantized[f"{name}_scales"] = random.integers(120, 132, (E, outputs, inputs // 32), np.uint8)
        (read,) = dequantized(stored(tmp_path, {key: quantized[key] for key in list(quantized)[-2:]})).values()
        plain[name] = np.array(read.read())
    trees = []
    for folder, arrays in (("plain", plain), ("quantized", quantized)):
        (tmp_path / folder).mkdir()
        stored(tmp_path / folder, arrays)
        (tmp_path / folder / "x.safetensors").rename(tmp_path / folder / "model.safetensors")
        method = {} if folder == "plain" else {"quantization_config": {"quant_method": "mxfp4"}}
        (tmp_path / folder / "config.json").write_text(json.dumps(config | method))
        trees.append(PublishedModel(tmp_path / folder).load(meshes.make(), TRAIN))
    jax.tree.map(np.testing.assert_array_equal, *trees)
    own = PublishedModel(tmp_path / "quantized")
    form = own.quantization
    assert form == Quantization("mxfp4", 32, tuple(f"layers/feed_forward/{name}" for name in ("down", "gate", "up")))
    kept = own.load(meshes.make(), TRAIN, None, form)
    assert kept["layers"]["feed_forward"]["up"]["values"].dtype == np.uint8
    widened = tree.parameters(lora.widen(nnx.merge(tree.abstract(own.model, quantized=form)[0], kept)))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), widened, trees[0])
    gates = plain["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(trees[0]["layers"]["feed_forward"]["up"][0], np.swapaxes(gates[..., 1::2], 1, 2))


@pytest.mark.parametrize("grid", [(2, 5), (3, 2, 1), (4,)])
def test_scales_that_suit_no_blocks_are_refused(tmp_path, grid):
    values = np.zeros((4, 8), ml_dtypes.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"w \[4, 8\] has scales .*, which are not one to each block"):
        dequantized(stored(tmp_path, {"w": values, "w_scale_inv": np.ones(grid, np.float32)}))


def test_blocks_that_are_no_mxfp4_are_refused(tmp_path):
    arrays = {"w_blocks": np.zeros((3, 4, 8), np.uint8), "w_scales": np.zeros((3, 4), np.uint8)}
    with pytest.raises(ValueError, match="w is no MXFP4"):
        dequantized(stored(tmp_path, arrays))


@pytest.mark.parametrize("method", ["bitsandbytes", "quanto"])
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(
        ValueError, match=f"quantized by '{method}', and jaxlm reads fp8, .*, awq and compressed-tensors alone"
    ):
        check_method({"text_config": {"quantization_config": {"quant_method": method}}}, "config.json")


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_quantized_model_is_read_and_exported_as_bfloat16(family, tmp_path):
    from jaxlm.api import export

    facts, _ = loud.read(family)
    weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in loud.weights(facts, "loud").items()}
    arrays, plain = {}, {}
    for name, x in weights.items():
        if name.endswith(QUANTIZED):
            values = x.astype(ml_dtypes.float8_e4m3fn)
            scales = np.full([-(-size // 16) for size in x.shape], 0.37, np.float32)
            arrays |= {name: values, f"{name}_scale_inv": scales}
            plain[name] = in_blocks(values, scales, (16, 16))
        else:
            arrays[name] = plain[name] = x
    folder = tmp_path / "fp8"
    folder.mkdir()
    stored(folder, arrays)
    (folder / "x.safetensors").rename(folder / "model.safetensors")
    described = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(facts["config"] | {"quantization_config": described}))
    said = []
    export(folder, tmp_path / "plain", say=said.append)
    [remark] = [line for line in said if "are quantized" in line]
    assert f"{sum(name.endswith(QUANTIZED) for name in weights)} tensors are quantized" in remark
    again = PublishedModel(tmp_path / "plain")
    assert "quantization_config" not in again.config
    assert again.stored.keys() == plain.keys()
    for name, x in plain.items():
        np.testing.assert_array_equal(again.stored[name].read(), x)


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": 3},
        {"quant_method": "compressed-tensors", "config_groups": 3},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": 3}}},
        {"quant_method": "compressed-tensors", "config_groups": {}, "sparsity_config": 3},
    ],
    ids=str,
)
def test_a_description_of_another_shape_is_one_line(described):
    with pytest.raises(InputError, match="config.json: quantization_config is malformed"):
        quantization({"quantization_config": described}, "config.json")
