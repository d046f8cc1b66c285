"""GGUF files: blocks to the bit, architectures as the Hugging Face directory that they were made of, tokenizers."""

import json
import math
from pathlib import Path

import gguf_files
import jax
import loud
import meshes
import numpy as np
import pytest
import vocabulary_fixtures as vocabularies
from flax import nnx
from matrices import sampled

from jaxlm import api, cli, config
from jaxlm.core.errors import InputError
from jaxlm.families.gguf.blocks import NOT_READ, TYPES
from jaxlm.families.gguf.model import GgufModel
from jaxlm.families.gguf.reader import read
from jaxlm.families.settings import model_of
from jaxlm.families.vocabularies.sentencepiece import SentencePieceModel
from jaxlm.models import lora, tree
from jaxlm.models.quantize_config import Quantization
from jaxlm.parallel.rules import TRAIN

BLOCKS = Path(__file__).with_name("gguf_blocks.npz")
QUANTIZED = {kind.name: kind for kind in TYPES.values() if kind.dequantize is not None}
# Fixture -> architecture, the metadata that only it has, and keys of config.json that its files imply.
ARCHITECTURES = {
    "llama2": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "smollm3": ("smollm3", {}, {"no_rope_layers": None, "no_rope_layer_interval": 4}),
    "granite": ("granite", {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
                            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}, {}),
    "gemma": ("gemma", {}, {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": "attn_logit_softcapping",
                          "final_logit_softcapping": "final_logit_softcapping",
                          "attention.sliding_window": "sliding_window"},
               {"query_pre_attn_scalar": 10, "layer_types": None, "sliding_window_pattern": 2}),
    "gemma3": ("gemma3", {"attention.sliding_window": "sliding_window"},
               {"query_pre_attn_scalar": 10, "layer_types": None, "sliding_window_pattern": 6, "rope_parameters": None,
                "rope_theta": 7000.0, "rope_local_base_freq": 10000.0}),
    "olmo2": ("olmo2", {}, {}),
    "starcoder2": ("starcoder2", {"attention.layer_norm_epsilon": "norm_epsilon"}, {"sliding_window": None}),
    "phi3": ("phi3", {"attention.sliding_window": "sliding_window",
                      "rope.scaling.original_context_length": "original_max_position_embeddings"}, {}),
    "phi4_mini": ("phi3", {"rope.scaling.original_context_length": "original_max_position_embeddings"}, {}),
    "gpt2": ("gpt2", {"attention.layer_norm_epsilon": "layer_norm_epsilon"}, {}),
}  # fmt: skip
ROTATED = {"phi4_mini": 6}
COMMON = {
    "context_length": ("max_position_embeddings", "n_positions"), "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"), "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"), "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",), "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
}  # fmt: skip


def converted(name: str, path: Path) -> tuple[Path, dict, dict[str, np.ndarray]]:
    """Return a GGUF file of a fixture, and the config.json and the tensors that it was made of."""
    fixture, _ = loud.read(name)
    architecture, own, implied = ARCHITECTURES[name]
    config = {key: value for key, value in (fixture["config"] | implied).items() if value is not None}
    metadata: dict = {"general.architecture": architecture, f"{architecture}.vocab_size": config["vocab_size"]}
    for key, names in COMMON.items():
        if of := next((config[each] for each in names if each in config), None):
            metadata[f"{architecture}.{key}"] = of
    if architecture != "gpt2":
        metadata |= {
            f"{architecture}.rope.freq_base": 7000.0,
            f"{architecture}.rope.dimension_count": ROTATED.get(name, 10),
        }
    metadata |= {f"{architecture}.{key}": config[of] for key, of in own.items() if of in config}
    heads, kv_heads = config.get("num_attention_heads", 1), config.get("num_key_value_heads", 1)
    tensors = loud.weights(fixture, "loud")
    stored = {
        gguf_files.named(architecture, each): gguf_files.stored(architecture, each, tensor, heads, kv_heads)
        for each, tensor in tensors.items()
    }
    if architecture == "phi3":
        rope = config["rope_parameters"]
        metadata["phi3.rope.scaling.attn_factor"] = math.sqrt(1 + math.log(128 / 16) / math.log(16))
        stored |= {f"rope_factors_{each}.weight": np.array(rope[f"{each}_factor"]) for each in ("long", "short")}
    return gguf_files.write(path / f"{name}.gguf", metadata, stored), config, tensors


def with_rows(header, number: int) -> dict[str, np.ndarray]:
    """Return the tensors of a file, with another number of rows in its vocabulary."""
    tensors = {name: np.asarray(tensor.read()) for name, tensor in header.tensors.items()}
    return {name: np.resize(x, (number, 48)) if len(x) == 97 else x for name, x in tensors.items()}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_have_the_bits_of_the_reference(name):
    """Made by llama.cpp's own Python package (gguf.quants.dequantize) of random bytes."""
    with np.load(BLOCKS) as arrays:
        packed, expected = arrays[f"{name}_bytes"], arrays[f"{name}_numbers"]
    numbers = QUANTIZED[name].dequantize(packed)
    assert numbers.dtype == np.float32 and numbers.shape == (len(packed), QUANTIZED[name].numbers)
    np.testing.assert_array_equal(numbers.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_read_as_the_directory_it_was_made_of(name, tmp_path):
    path, config, tensors = converted(name, tmp_path)
    model = GgufModel(path)
    assert model.model == model_of(config, name)
    assert model.tensors.keys() <= model.stored.keys() and model.stored.keys() == tensors.keys()
    for each, tensor in model.stored.items():
        if name.startswith("gemma") and each.endswith("norm.weight"):  # one is added, and subtracted again
            np.testing.assert_allclose(tensor.read(), tensors[each], atol=2**-23)
        else:
            np.testing.assert_array_equal(tensor.read(), tensors[each])


def test_quantized_tensors_are_float32(tmp_path):
    """A matrix of 64 columns, since no row of the fixture's is whole blocks."""
    packed = np.resize(np.arange(34, dtype=np.uint8), (2 * 48, 34))
    path = gguf_files.write(tmp_path / "x.gguf", {}, {"x": ("Q8_0", (48, 64), packed.tobytes())})
    (tensor,) = read(path).tensors.values()
    assert tensor.dtype_name == "F32" and tensor.shape == (48, 64)
    np.testing.assert_array_equal(tensor.read(), QUANTIZED["Q8_0"].dequantize(packed).reshape(48, 64))


def in_blocks(path: Path, kind: str) -> Path:
    """Return a file of a Llama of 64 channels with matrices in blocks of 32 of one type."""
    path, _, _ = converted("llama2", path)
    metadata = dict(read(path).metadata)
    sizes = {"embedding_length": 64, "feed_forward_length": 96, "rope.dimension_count": 16}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16}
    metadata |= {f"llama.{key}": size for key, size in (sizes | heads).items()}
    widths = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    widths |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    random, tensors = np.random.default_rng(0), {}
    for name, tensor in read(path).tensors.items():
        part = name.split(".")[-2]
        if part not in widths:
            tensors[name] = random.standard_normal((*tensor.shape[:-1], 64), np.float32)
            continue
        blocks = random.integers(0, 256, (math.prod(widths[part]) // 32, QUANTIZED[kind].bytes), np.uint8)
        blocks[:, 1] = 0x24 if kind != "MXFP4" else blocks[:, 1]  # a float16 near 1/64
        blocks[:, 0] = 121 if kind == "MXFP4" else blocks[:, 0]
        tensors[name] = (kind, widths[part], blocks.tobytes())
    return gguf_files.write(path, metadata, tensors)


@pytest.mark.parametrize("kind", sampled(["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"], ["Q4_0", "IQ4_NL"]))
def test_blocks_of_one_scale_are_kept_as_they_are_stored(kind, tmp_path):
    """Rotary pairs and all: the numbers are those of the file in float32."""
    path = in_blocks(tmp_path, kind)
    model, form = GgufModel(path), Quantization("int4" if kind == "Q4_0" else "int8", 32)
    assert model.quantization == form == config.load(path, kind="decode").execution.quantization
    own, wide = (model.load(meshes.make(), TRAIN, "float32", each) for each in (form, None))
    module = nnx.merge(tree.abstract(model.model, quantized=form)[0], own)
    jax.tree.map(np.testing.assert_array_equal, tree.parameters(lora.widen(module)), wide)
    assert model.remarks(form) == [f"21 tensors are quantized and are kept as they are stored, as {form}"]
    assert model.remarks() == ["21 tensors are quantized and are read as float32, as an export has them"]


def test_a_file_generates_imports_and_exports(tmp_path, capsys):
    path, _, tensors = converted("llama2", tmp_path)
    header = read(path)
    gguf_files.write(path, header.metadata, with_rows(header, 300))
    assert cli.main(["generate", str(path), "--token-ids", "3,4,5", "--max-tokens", "4", "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["token_ids"]
    assert cli.main(["import", str(path), str(tmp_path / "run")]) == 0
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    for model in (tmp_path / "run", tmp_path / "hf"):
        assert cli.main(["generate", str(model), "--token-ids", "3,4,5", "--max-tokens", "4", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == ids
    assert cli.main(["plan", str(path), "--on", "h100-sxm5", "--workload", "decode", "--json"]) == 0
    loaded = api.load(tmp_path / "hf")
    assert loaded.source.model.stored.keys() == tensors.keys()


def test_the_tokenizer_of_byte_pairs(tmp_path):
    path, _, _ = converted("qwen2", tmp_path)
    header = read(path)
    letters = [vocabularies.spelled(bytes([byte])) for byte in range(256)]
    names = [*letters, "th", "the", "<|endoftext|>", "<|im_end|>"]
    metadata = header.metadata | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [1] * 258 + [3, 3], "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.eos_token_id": 258, "tokenizer.ggml.eot_token_id": 259,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    }  # fmt: skip
    rows = with_rows(header, len(names))
    model = api.load(gguf_files.write(path, metadata, rows))
    assert model.tokenizer.decode(model.encode("the thing <|im_end|>")) == "the thing <|im_end|>"
    assert model.encode("the")[-1] == names.index("the") and {258, 259} <= model.tokenizer.stop_token_ids
    assert model.chat_template is not None


def test_the_tokenizer_of_pieces(tmp_path):
    path, _, _ = converted("llama2", tmp_path)
    header = read(path)
    content = vocabularies.bpe_file()
    pieces = SentencePieceModel(content).pieces
    metadata = header.metadata | {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [piece.text for piece in pieces],
        "tokenizer.ggml.scores": [piece.score for piece in pieces],
        "tokenizer.ggml.token_type": [int(piece.kind) for piece in pieces],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    rows = with_rows(header, len(pieces))
    model = api.load(gguf_files.write(path, metadata, rows))
    text = "def value  </s> mit Ümlaut"
    ids = model.encode(text)
    assert ids == [1, *SentencePieceModel(content).ids(text)] and model.tokenizer.decode(ids) == text


def test_what_is_not_read_is_refused_by_name(tmp_path):
    path, _, _ = converted("llama2", tmp_path)
    header = read(path)
    stored = {name: np.asarray(tensor.read()) for name, tensor in header.tensors.items()}

    def refused(metadata=header.metadata, tensors=stored) -> str:
        with pytest.raises(InputError) as error:
            GgufModel(gguf_files.write(path, metadata, tensors)).tensors  # noqa: B018, read on demand
        return str(error.value)

    assert "architecture 'mamba'" in refused(header.metadata | {"general.architecture": "mamba"})
    assert "expert_count" in refused(header.metadata | {"llama.expert_count": 8})
    assert "rope.scaling.odd" in refused(header.metadata | {"llama.rope.scaling.odd": 8})
    assert "blk.0.odd" in refused(tensors=stored | {"blk.0.odd.weight": np.zeros(3)})
    assert "neither Llama 3.1" in refused(tensors=stored | {"rope_freqs.weight": np.full(5, 2.0)})
    for kind in ("no tokenizer", "bert"):
        if kind == "bert":
            kinds = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]}
            assert "'bert'" in refused(header.metadata | kinds)
    whole = gguf_files.write(path, header.metadata, stored).read_bytes()
    for size in (3, 20, 200, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="cut off|no GGUF"):
            read(path)
    (number, name), *_ = NOT_READ.items()
    at = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    path.write_bytes(whole[:at] + number.to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(InputError, match=name):
        read(path)
