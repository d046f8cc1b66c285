"""Published matrices that are kept in the width that they are stored in."""

import jax
import meshes
import numpy as np
import packed_directories
import pytest
from flax import nnx
from matrices import sampled
from packed_directories import compressed, describe

from jaxlm import api, config
from jaxlm.families.directory import PublishedModel
from jaxlm.families.quantized.scaled import ScaledTensor
from jaxlm.models import lora, tree
from jaxlm.models.quantize_config import Quantization
from jaxlm.parallel.rules import TRAIN

FORMS = {
    "gptq": (describe("gptq"), Quantization("int4", 128)),
    "gptq of 8 bits": (describe("gptq", bits=8, group=-1), Quantization("int8")),
    "gptq of zero points": (describe("gptq", group=32, symmetric=False), Quantization("int8", 32)),
    "awq": (describe("awq"), Quantization("int8", 128)),
    "fp8 of blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Quantization("fp8", 128)),
    "fp8 of one scale": ({"quant_method": "fp8", "weight_block_size": None}, Quantization("fp8")),
    "compressed int4": (compressed("pack-quantized", 4, 32), Quantization("int4", 32)),
    "compressed words of int8": (compressed("pack-quantized", 8, 128), Quantization("int8", 128)),
    "compressed int8": (compressed("int-quantized"), Quantization("int8")),
    "compressed fp8": (compressed("float-quantized", kind="float"), Quantization("fp8")),
}
_STORED = {"int4": "uint8", "int8": "int8", "fp8": "float8_e4m3fn"}
_TOKENS = [[5, 3, 80, 2, 41, 7]]


def widened(model, form, parameters):
    return tree.parameters(lora.widen(nnx.merge(tree.abstract(model, quantized=form)[0], parameters)))


CASES = [pytest.param(described, form, id=name) for name, (described, form) in FORMS.items()]
KEPT = ["gptq", "gptq of zero points", "fp8 of blocks", "compressed int4"]


@pytest.mark.parametrize("described, form", sampled(CASES, KEPT))
def test_numbers_are_those_that_are_stored(described, form, tmp_path):
    packed_directories.make(tmp_path, described)
    own, wide = (PublishedModel(tmp_path / name) for name in ("packed", "wide"))
    assert own.quantization == form
    kept = own.load(meshes.make(1, 1, 2), TRAIN, "float32", form)
    assert kept["layers"]["attention"]["query"]["values"].dtype == _STORED[form.kind]
    jax.tree.map(np.testing.assert_array_equal, widened(own.model, form, kept), wide.load(meshes.make(), TRAIN))


@pytest.mark.parametrize("name", sampled(["gptq", "awq", "fp8 of blocks", "compressed int4"], ["fp8 of blocks"]))
def test_numbers_of_experts_are_those_that_are_stored(name, tmp_path):
    """Whose inputs stand after their outputs in a file, and before them where they are kept."""
    described, form = FORMS[name]
    packed_directories.make(tmp_path, described, family="qwen3_moe")
    own, wide = (PublishedModel(tmp_path / each) for each in ("packed", "wide"))
    assert own.quantization == form
    kept = own.load(meshes.make(1, 1, 2), TRAIN, "float32", form)
    values = kept["layers"]["feed_forward"]["down"]["values"]
    assert values.dtype == _STORED[form.kind] and values.shape == (2, 4, 128 // (1 + (form.kind == "int4")), 128)
    jax.tree.map(np.testing.assert_array_equal, widened(own.model, form, kept), wide.load(meshes.make(), TRAIN))


@pytest.mark.parametrize("name", sampled(["gptq", "fp8 of blocks"], ["fp8 of blocks"]))
def test_a_model_is_loaded_so_and_its_logits_are_those_of_its_numbers_in_float32(name, tmp_path):
    """To the order of sums. Planning, which reads config.json alone, counts the same form."""
    described, form = FORMS[name]
    packed_directories.make(tmp_path, described)
    own, said = tmp_path / "packed", []
    model = api.load(own, dtype="float32", say=said.append)
    assert model.quantization == config.load(own, kind="decode").execution.quantization == form
    logits = np.asarray(model.logits(_TOKENS))
    assert any(f"14 tensors are quantized and are kept as they are stored, as {form}" in line for line in said)
    expected = np.asarray(api.load(tmp_path / "wide", dtype="float32").logits(_TOKENS))
    np.testing.assert_allclose(logits, expected, atol=2e-6 * np.abs(expected).max())
    in_full = api.load(own, ["execution.quantize=none"], dtype="float32")
    assert in_full.quantization is None and in_full.parameters["layers"]["attention"]["query"].dtype == "float32"
    assert config.load(own).execution.quantization is None  # in training


def test_matrices_that_are_not_all_quantised_are_left(tmp_path):
    described, form = FORMS["gptq"]
    packed_directories.make(tmp_path, described, whole=("layers.1.mlp.down_proj", "k_proj"))
    paths = [f"layers/{name}" for name in ("attention/output", "attention/query", "attention/value")]
    paths += [f"layers/feed_forward/{name}" for name in ("gate", "up")]
    assert api.load(tmp_path / "packed").quantization == form._replace(targets=tuple(paths))


@pytest.mark.exhaustive
def test_an_engine_writes_the_text_of_the_numbers_in_float32(tmp_path):
    packed_directories.make(tmp_path, FORMS["gptq"][0], whole=("layers.1.mlp.down_proj", "k_proj"))
    own, wide = (api.load(tmp_path / name, dtype="float32") for name in ("packed", "wide"))
    texts = [[text.token_ids for text in each.generate(_TOKENS, 12, temperature=0)] for each in (own, wide)]
    assert texts[0] == texts[1]


def test_what_is_stored_in_the_form_asked_for_is_kept_and_the_rest_rounded(tmp_path):
    packed_directories.make(tmp_path, FORMS["gptq of 8 bits"][0], whole=("down_proj",))
    asked = Quantization("int8")
    wide, own = (
        PublishedModel(tmp_path / name).load(meshes.make(), TRAIN, "float32", asked) for name in ("wide", "packed")
    )
    layers = own["layers"]["feed_forward"], wide["layers"]["feed_forward"]
    jax.tree.map(np.testing.assert_array_equal, *(layer["down"] for layer in layers))
    assert np.any(np.asarray(layers[0]["up"]["scales"] != layers[1]["up"]["scales"]))


def test_zero_points_that_are_not_what_is_said_are_refused(tmp_path):
    packed_directories.make(tmp_path, described := describe("gptq", symmetric=False))
    packed_directories.write(
        tmp_path / "x", {}, packed_directories.CONFIG | {"quantization_config": described | {"sym": True}}
    )
    (tmp_path / "packed" / "model.safetensors").rename(tmp_path / "x" / "model.safetensors")
    with pytest.raises(ValueError, match=r"are not the middle of 4 bits, and \"sym\" says so: set it to false"):
        api.load(tmp_path / "x").parameters  # noqa: B018


def test_targets_that_are_no_matrices_are_refused(tmp_path):
    packed_directories.make(tmp_path, FORMS["awq"][0])
    changes = ["execution.quantize=int8", 'execution.quantize_targets=["*/norm"]']
    with pytest.raises(ValueError, match=r"quantize_targets\[0\] = '\*/norm' is of no matrix that can be quantised"):
        api.load(tmp_path / "wide", changes).parameters  # noqa: B018


@pytest.mark.parametrize(
    "kind, group, form, inputs, fits",
    [
        ("int8", 0, Quantization("w8a8"), 96, True),  # whose numbers are those of int8
        ("int8", 0, Quantization("int8", 64), 96, True),  # in groups of 32, with one scale
        ("int4", 256, Quantization("int4", 128), 512, True),
        ("fp8", 128, Quantization("fp8", 128), 576, True),  # in groups of 64: the last block is half a one
        ("fp8", 128, Quantization("fp8"), 256, False),
        ("int8", 16, Quantization("int8", 32), 64, False),
        ("int8", 0, Quantization("int8", 32), 48, False),  # such a matrix is not quantised
        ("int4", 32, Quantization("int8", 32), 64, False),
    ],
)
def test_a_form_has_the_scales_of_another_where_its_groups_divide_the_others(kind, group, form, inputs, fits):
    shape = (4, inputs)
    tensor = ScaledTensor(np.dtype(np.float32), shape, lambda: np.zeros(shape), kind, group, lambda: ())
    assert tensor.fits(form, inputs) is fits
