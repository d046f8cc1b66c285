"""Families with recurrent layers: spellings of the kinds of layers, what fixtures notice, further tensors, counts."""

from pathlib import Path

import jax
import jax.numpy as jnp
import loud
import meshes
import numpy as np
import pytest
from markers import ELSEWHERE
from matrices import sampled
from running import logits, save
from tiny_configs import RECURRENT, without
from workload_fixtures import workload

from jaxlm import api, config
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import parameter_counts
from jaxlm.families.directory import PublishedModel
from jaxlm.families.family import families
from jaxlm.families.settings import config_of, family_of, model_of
from jaxlm.lowering import report, targets
from jaxlm.models import tree
from jaxlm.models.doors.scan import ChunkRows
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.rules import TRAIN
from kernels_pallas.linear_attention import CHUNK

MODELS = Path(__file__).parents[2] / "configs" / "models"
DELTA = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "full_attention_interval": 4, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
NEXT = DELTA | {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    "linear_num_value_heads": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


A3B = without(NEXT, "decoder_sparse_step", "mlp_only_layers") | {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256,
    "num_experts_per_tok": 8,
}  # fmt: skip
A17B = A3B | {
    "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
    "linear_num_value_heads": 64,
}  # fmt: skip
LFM2 = {
    "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288, "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_dim": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "conv_dim": 2048,
    "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000,
    "rope_theta": 1000000.0, "block_use_swiglu": True, "use_pos_enc": True, "tie_embedding": True,
}  # fmt: skip
A1B = {
    "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168, "norm_eps": 1e-5,
    "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "conv_L_cache": 3, "conv_bias": False,
    "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0, "tie_word_embeddings": True,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    "max_position_embeddings": 128000, "rope_theta": 1000000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "total", "active", "state"),
    sampled(
        [
            pytest.param(NEXT, 79_674_391_296, 3_874_929_408, 0, id="Qwen3-Next-80B-A3B"),
            pytest.param(A3B, 34_660_610_688, 3_454_988_928, 0, id="Qwen3.5-35B-A3B"),
            pytest.param(A17B, 396_346_350_336, 17_349_040_896, 0, id="Qwen3.5-397B-A17B"),
            pytest.param(LFM2, 1_170_340_608, 1_170_340_608, 0, id="LFM2-1.2B"),
            pytest.param(A1B, 8_339_929_856, 1_557_740_288, 704, id="LFM2-8B-A1B"),
        ],
        ["Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "LFM2-1.2B", "LFM2-8B-A1B"],
    ),
)
def test_counts_are_those_of_transformers_modules(settings, total, active, state):
    model = model_of(settings, "config.json")
    counts = parameter_counts(workload("train", model, batch=8, sequence=1024))
    assert (counts["total"], counts["active"]) == (total, active)
    declared = tree.paths(tree.dimensions(tree.abstract(model)[1]))
    assert sum(np.prod(d.shape) for d in declared.values() if d.is_state) == state


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3-next-80b-a3b", NEXT), ("qwen3.5-35b-a3b", A3B), ("lfm2-1.2b", LFM2), ("lfm2-8b-a1b", A1B)],
)
def test_configurations_here_are_the_published_ones(name, settings):
    model, here = model_of(settings, name), config.load(MODELS / f"{name}.toml").model
    family = families()[settings["model_type"]]
    assert config_of(model, family) == config_of(here, family)
    assert [entry.layers for entry in model.pattern] == [entry.layers for entry in here.pattern]


def test_the_small_hybrid_is_of_a_published_family_and_as_large_as_its_twin_of_attention():
    hybrid, twin = (config.load(MODELS.parent / "hybrid.toml", changed).model for changed in ([], ["model.pattern=[]"]))
    assert family_of(hybrid).name == family_of(twin).name == "qwen3_5_text"
    assert [layer.attention.kind for layer in hybrid.layers] == ["gated_delta"] * 3 + ["gqa"]
    assert 1 < tree.parameter_count(hybrid) / tree.parameter_count(twin) < 1.005  # convolutions, rates and norms


def kinds(settings):
    return [layer.attention.kind for layer in model_of(settings, "config.json").layers]


def test_every_spelling_of_layers_with_attention_is_read_and_both_are_written():
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    bare = without(NEXT, "full_attention_interval") | {"num_hidden_layers": 4}
    every = bare | {"full_attention_interval": 2}
    listed, older = bare | {"layer_types": types}, bare | {"layer_types": ["linear_attention", "attention"] * 2}
    assert kinds(every) == kinds(listed) == kinds(older) == kinds(every | listed) == ["gated_delta", "gqa"] * 2
    assert kinds(bare) == ["gated_delta"] * 3 + ["gqa"]
    written = config_of(model_of(every, "x"), families()["qwen3_next"])
    assert (written["layer_types"], written["full_attention_interval"]) == (types, 2)
    irregular = ["full_attention", *types[:3]]
    written = config_of(model_of(bare | {"layer_types": irregular}, "x"), families()["qwen3_next"])
    assert written["layer_types"] == irregular and "full_attention_interval" not in written
    convolutions = ["full_attention" if kind == "gqa" else "conv" for kind in kinds(LFM2)]
    assert kinds(without(LFM2, "full_attn_idxs") | {"layer_types": convolutions}) == kinds(LFM2)
    assert kinds(LFM2 | {"layer_types": convolutions}) == kinds(LFM2)
    written = config_of(model_of(LFM2, "x"), families()["lfm2"])
    assert (written["layer_types"], written["full_attn_idxs"]) == (convolutions, LFM2["full_attn_idxs"])
    assert set(kinds(without(LFM2, "full_attn_idxs"))) == {"gqa"}


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (NEXT, {"full_attention_interval": 0}, "full_attention_interval = 0; it must be a whole number above 0"),
        (NEXT, {"layer_types": ["linear_attention"] * 48}, "layer_types and full_attention_interval = 4 differ"),
        (NEXT, {"layer_types": ["full_attention"] * 4}, "layer_types names 4 layers, and num_hidden_layers = 48"),
        (NEXT, {"layer_types": ["mamba"] * 48}, "layer_types has mamba, and jaxlm has full_attention and linear_atten"),
        (NEXT, {"layer_types": "full_attention"}, "layer_types = 'full_attention'; it must be a list of the kinds"),
        (NEXT, {"linear_num_key_heads": 5}, "num_key_heads = 5 does not divide"),
        (NEXT, {"linear_conv_kernel_dim": 1}, "taps"),
        (LFM2, {"full_attn_idxs": [2, 16]}, "full_attn_idxs = [2, 16]; it must be a list of layers from 0 to 15"),
        (LFM2, {"layer_types": ["conv"] * 16}, "layer_types and full_attn_idxs = [2, 5, 8, 10, 12, 14] differ; leave"),
        (LFM2, {"block_multiple_of": 0}, "block_multiple_of = 0; it must be a whole number above 0"),
        (LFM2, {"conv_dim": 1024}, "conv_dim = 1024 and hidden_size = 2048 are two names of one setting"),
        (A1B, {"num_dense_layers": 24}, "num_dense_layers = 24 leaves no layer of 24 with experts"),
        (A3B, {"attn_output_gate": False}, "attn_output_gate = False, and jaxlm has qwen3_5_moe_text with True alone"),
        (NEXT, {"attention_bias": True}, "attention_bias = True, and jaxlm has qwen3_next with False alone"),
    ],
)
def test_keys_that_describe_no_model_are_refused(base, changes, message):
    with pytest.raises(InputError) as error:
        model_of(base | changes, "config.json")
    assert message in str(error.value) and "\n" not in str(error.value)


def packed_error(name, folder):
    """Return the largest error of a logit of packed documents, relative to the largest logit, and the tolerance."""
    facts, arrays = loud.read(name)
    published = PublishedModel(save(folder, facts["config"], loud.weights(facts, "loud")))
    documents = facts["packed"]["documents"]
    tokens, positions = [sum(documents, [])], [sum([[*range(len(each))] for each in documents], [])]
    with jax.set_mesh(meshes.make(1, 1, 1)):
        given = logits(published.model, published.load(meshes.make(1, 1, 1), TRAIN), tokens, positions)
    error = np.abs(np.asarray(given)[0, facts["packed"]["positions"]] - arrays["packed"]).max()
    return error / facts["largest"]["loud"], facts["tolerance"]


LEAKS = [
    pytest.param(name, column, id=f"{name}-{column}") for name in sorted(RECURRENT) for column in (0, 1, CHUNK - 1)
]


@pytest.mark.parametrize(("name", "column"), sampled(LEAKS, [f"qwen3_next-{CHUNK - 1}"]))
def test_a_fixture_notices_a_document_that_reads_the_one_before(name, column, monkeypatch, tmp_path):
    """Documents that begin on the first, the second or the last token of a chunk do, one place at a time."""

    def documents(self):
        at_column = jnp.arange(self.begins_BC.shape[1])[None] % CHUNK == column
        return jnp.cumsum(self.begins_BC & self.is_token_BC & ~at_column, axis=1, dtype=jnp.int32)

    monkeypatch.setattr(ChunkRows, "document_BC", property(documents))
    error, tolerance = packed_error(name, tmp_path)
    assert error >= 30 * tolerance


def test_an_import_keeps_layers_for_multi_token_prediction_that_no_key_counts(tmp_path):
    facts, _ = loud.read("qwen3_next")
    weights = loud.weights(facts, "loud")
    further = {"mtp.fc.weight": np.ones((2, 4), np.float32), "mtp.layers.0.mlp.gate.weight": np.ones(3, np.float32)}
    found = PublishedModel(save(tmp_path, facts["config"], weights | further))
    assert found.tensors.keys() == weights.keys() and found.dropped == list(further)
    api.export(tmp_path, tmp_path / "out", say=lambda line: None)
    back = PublishedModel(tmp_path / "out")
    assert back.config == facts["config"] and back.stored.keys() == weights.keys() | further.keys()
    for key in back.stored:
        assert back.stored[key].read().tobytes() == found.stored[key].read().tobytes(), key


def test_the_text_part_of_a_model_of_text_and_pictures_is_read_with_its_further_layers(tmp_path):
    facts, _ = loud.read("qwen3_5")
    weights = loud.weights(facts, "loud")
    nested = {key.replace("model.", "model.language_model.", 1): x for key, x in weights.items()}
    further = {"mtp.fc.weight": np.ones((2, 4), np.float32)}
    pictures = {"model.visual.patch_embed.proj.weight": np.ones((2, 3), np.float32)}
    settings = {"model_type": "qwen3_5", "text_config": facts["config"], "vision_config": {"depth": 2}}
    found = PublishedModel(save(tmp_path, settings, nested | further | pictures))
    assert found.tensors.keys() == weights.keys() and found.mtp_tensors.keys() == further.keys()
    for key, x in weights.items():
        np.testing.assert_array_equal(found.stored[key].read(), x)


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 4, "tensor": 2}, {"data": 2, "expert": 4}], ids=str)
def test_decoding_qwen3_next_multiplies_what_is_counted(sizes):
    """One of its periods of four layers, in full width: XLA's products, and the tiles of kernels with their experts."""
    target = Target.parse("h200-sxm:8")
    experiment = config.load(MODELS / "qwen3-next-80b-a3b.toml", ["model.num_layers=4"], "decode")
    mesh = make_mesh(meshes.layout(**sizes), targets.devices(target))
    compiled = report.compile(experiment, "decode", target, mesh, False).report
    assert compiled.flops == compiled.counted_flops
    assert compiled.kernel_flops == pytest.approx(compiled.counted_kernel_flops, rel=1e-9)  # shared out as floats
