"""Directories of GPTQ and AWQ, against matrices decoded number by number."""

import jax
import meshes
import numpy as np
import packed_directories
import pytest
from packed_directories import describe

from jaxlm.families.directory import PublishedModel
from jaxlm.families.quantized import check_method
from jaxlm.parallel.rules import TRAIN

FORMS = {
    "gptq": describe("gptq"),
    "gptq of 8 bits": describe("gptq", bits=8, group=-1),
    "gptq of zero points": describe("gptq", group=32, symmetric=False),
    "gptq of 8 bits and zero points, second format": describe("gptq", 8, 64, False, "gptq_v2"),
    "awq": describe("awq"),
}


@pytest.mark.parametrize("described", FORMS.values(), ids=FORMS)
def test_packed_matrices_are_read_to_the_bit(described, tmp_path):
    wide = packed_directories.make(tmp_path, described)
    model = PublishedModel(tmp_path / "packed")
    for name in model.tensors:
        np.testing.assert_array_equal(model.stored[name].read().astype(np.float32), wide[name], err_msg=name)
    assert "14 tensors are quantized and are read as float32, as an export has them" in model.remarks()


def test_inputs_of_any_group_are_read_and_spare_biases_left(tmp_path):
    """Quantised in the order of activations (desc_act), inputs beside one another have scales of several groups."""
    packed_directories.make(tmp_path, describe("gptq", group=32, symmetric=False), permuted=True)
    own, wide = (PublishedModel(tmp_path / name).load(meshes.make(), TRAIN, "float32") for name in ("packed", "wide"))
    jax.tree.map(np.testing.assert_array_equal, own, wide)
    biases = [name for name in PublishedModel(tmp_path / "packed").dropped if name.endswith(".bias")]
    assert len(biases) == 6


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"bits": 3}, "bits = 3 of gptq, and jaxlm reads 4 and 8 alone"),
        ({"group_size": 0}, "group_size = 0 of gptq, and jaxlm reads -1"),
        ({"sym": "yes"}, "sym = 'yes' of gptq"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' of gptq, and jaxlm reads 'gptq' and 'gptq_v2'"),
        ({"is_marlin_format": True}, "is_marlin_format = True of gptq"),
        ({"dynamic": {"-:a": {}, "+:b": {"bits": 8}}}, r"dynamic = '\+:b' of gptq"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8 of awq, and jaxlm reads 4 alone"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv' of awq, and jaxlm reads 'gemm' alone"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False of awq"),
    ],
)
def test_other_forms_are_refused_by_their_key(changed, said):
    with pytest.raises(ValueError, match=said):
        check_method({"quantization_config": describe("gptq") | changed}, "config.json")


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("num_bits", 3, "weights = '3 bits of int'"),
        ("symmetric", False, "weights.symmetric = False of compressed-tensors, and jaxlm reads true alone"),
        ("actorder", "group", "weights.actorder = 'group'"),
        ("format", "nvfp4-pack-quantized", "format = 'nvfp4-pack-quantized' of compressed-tensors"),
    ],
)
def test_other_forms_of_compressed_tensors_are_refused_by_their_key(key, value, said):
    described = packed_directories.compressed("pack-quantized", 4, 32)
    (described if key == "format" else described["config_groups"]["group_0"]["weights"])[key] = value
    with pytest.raises(ValueError, match=said):
        check_method({"quantization_config": described}, "config.json")


@pytest.mark.parametrize("bits", [4, 8])
def test_words_of_compressed_tensors_are_read_to_the_bit(bits, tmp_path):
    wide = packed_directories.make(tmp_path, packed_directories.compressed("pack-quantized", bits, 64))
    model = PublishedModel(tmp_path / "packed")
    for name in model.tensors:
        np.testing.assert_array_equal(model.stored[name].read().astype(np.float32), wide[name], err_msg=name)


def test_parts_that_do_not_suit_one_another_are_refused(tmp_path):
    arrays = {"a.qweight": np.zeros((16, 8), np.int32), "a.qzeros": np.zeros((1, 1), np.int32)}
    arrays["a.scales"] = np.ones((2, 8), np.float16)
    packed_directories.write(
        tmp_path / "x", arrays, packed_directories.CONFIG | {"quantization_config": describe("gptq")}
    )
    with pytest.raises(ValueError, match=r"a has .qweight I32 \[16, 8\].*must have .qzeros \[1, 1\], .scales \[1, 8\]"):
        PublishedModel(tmp_path / "x").stored  # noqa: B018
    del arrays["a.scales"]
    packed_directories.write(
        tmp_path / "y", arrays, packed_directories.CONFIG | {"quantization_config": describe("gptq")}
    )
    with pytest.raises(ValueError, match=r"a.scales is missing, which a.qweight needs"):
        PublishedModel(tmp_path / "y").stored  # noqa: B018
