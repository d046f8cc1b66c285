"""Families with recurrent layers: spellings of the kinds of layers, what fixtures notice, further tensors, counts."""

from pathlib import Path

import jax
import jax.numpy as jnp
import loud
import meshes
import numpy as np
import pytest
from matrices import sampled
from running import logits, save
from tiny_configs import RECURRENT
from workload_fixtures import workload

from jaxlm import api, config
from jaxlm.core.errors import InputError
from jaxlm.costs.plan import parameter_counts
from jaxlm.families.directory import PublishedModel
from jaxlm.families.family import families
from jaxlm.families.settings import config_of, model_of
from jaxlm.models.doors.scan import ChunkRows
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


@pytest.mark.parametrize(
    ("settings", "total", "active", "state"),
    [pytest.param(NEXT, 79_674_391_296, 3_874_929_408, 0, id="Qwen3-Next-80B-A3B")],
)
def test_counts_are_those_of_transformers_modules(settings, total, active, state):
    counts = parameter_counts(workload("train", model_of(settings, "config.json"), batch=8, sequence=1024))
    assert (counts["total"], counts["active"], counts.get("state", 0)) == (total, active, state)


@pytest.mark.parametrize(("name", "settings"), [("qwen3-next-80b-a3b", NEXT)])
def test_configurations_here_are_the_published_ones(name, settings):
    model, here = model_of(settings, name), config.load(MODELS / f"{name}.toml").model
    family = families()[settings["model_type"]]
    assert config_of(model, family) == config_of(here, family)
    assert [entry.layers for entry in model.pattern] == [entry.layers for entry in here.pattern]


def kinds(settings):
    return [layer.attention.kind for layer in model_of(settings, "config.json").layers]


def test_every_spelling_of_layers_with_attention_is_read_and_both_are_written():
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    bare = {key: value for key, value in NEXT.items() if key != "full_attention_interval"} | {"num_hidden_layers": 4}
    every = bare | {"full_attention_interval": 2}
    listed, older = bare | {"layer_types": types}, bare | {"layer_types": ["linear_attention", "attention"] * 2}
    assert kinds(every) == kinds(listed) == kinds(older) == kinds(every | listed) == ["gated_delta", "gqa"] * 2
    assert kinds(bare) == ["gated_delta"] * 3 + ["gqa"]
    written = config_of(model_of(every, "x"), families()["qwen3_next"])
    assert (written["layer_types"], written["full_attention_interval"]) == (types, 2)
    irregular = ["full_attention", *types[:3]]
    written = config_of(model_of(bare | {"layer_types": irregular}, "x"), families()["qwen3_next"])
    assert written["layer_types"] == irregular and "full_attention_interval" not in written


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
