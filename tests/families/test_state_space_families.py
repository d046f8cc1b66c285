"""Families with Mamba-2: spellings of their keys, what is refused, published sizes."""

import json
import math
from pathlib import Path

import pytest

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.families.family import families
from jaxlm.families.settings import config_of, family_of, model_of

MODELS = Path(__file__).parents[2] / "configs" / "models"
MAMBA = {
    "model_type": "mamba2", "vocab_size": 50288, "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80,
    "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2, "tie_word_embeddings": True, "use_bias": False,
    "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, math.inf], "conv_kernel": 4,
}  # fmt: skip
CODESTRAL = MAMBA | {
    "vocab_size": 32768, "hidden_size": 4096, "num_heads": 128, "n_groups": 8, "tie_word_embeddings": False,
    "intermediate_size": 8192, "norm_before_gate": True, "rms_norm": True, "time_step_rank": 256,
}  # fmt: skip
PUBLISHED = {"mamba2-2.7b": MAMBA, "codestral-mamba-7b": CODESTRAL}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_here_are_the_published_ones(name):
    model, here = model_of(PUBLISHED[name], name), config.load(MODELS / f"{name}.toml").model
    assert config_of(model, families()[PUBLISHED[name]["model_type"]]) == config_of(here, family_of(here))
    assert model.entries[0][1].feed_forward.kind == "none" or model.pattern == here.pattern


def limits(found):
    return model_of(json.loads(json.dumps(MAMBA | {"time_step_limit": found})), "x").attention.time_limits


def test_limits_of_time_steps_are_read_as_every_version_of_transformers_writes_them():
    infinity = {"__float__": "Infinity"}
    assert limits([0.0, math.inf]) is limits([0.0, infinity]) is limits(None) is None
    assert limits([0.5, math.inf]) == limits([0.5, infinity]) == (0.5, math.inf)
    assert limits([0, 2]) == (0.0, 2.0)
    for found in ([0.0, math.inf], [0.25, 2.0]):
        model = model_of(MAMBA | {"time_step_limit": found}, "x")
        assert config_of(model, families()["mamba2"])["time_step_limit"] == found


def test_a_context_is_written_under_a_key_that_transformers_does_not_read():
    model = model_of(MAMBA | {"max_position_embeddings": 4096}, "x")
    assert model.context_length == 4096 and model_of(MAMBA, "x").context_length == 262144
    assert config_of(model, families()["mamba2"])["max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expand": 3}, "expand = 3, and with the file's other keys it can be 2 alone"),
        ({"intermediate_size": 4096}, "intermediate_size = 4096, and with the file's other keys it can be 5120 alone"),
        ({"use_bias": True}, "use_bias = True, and jaxlm has mamba2 with False alone"),
        ({"rms_norm": False}, "rms_norm = False, and jaxlm has mamba2 with True alone"),
        ({"n_groups": 3}, "num_groups = 3 does not divide"),
        ({"time_step_limit": [0.1]}, "time_step_limit = [0.1]; it must be a list of the least and the greatest"),
        ({"time_step_limit": [0.1, "inf"]}, "time_step_limit = [0.1, 'inf']; it must be a list of the least"),
        ({"time_step_limit": [2.0, 1.0]}, "must be a lower and a higher limit"),
        ({"conv_kernel": 1}, "taps"),
        ({"layer_types": ["full_attention"] * 64}, "layer_types: jaxlm knows no such key of mamba2"),
    ],
)
def test_keys_that_describe_no_model_are_refused(changes, message):
    with pytest.raises(InputError) as error:
        model_of(MAMBA | changes, "config.json")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_model_whose_heads_are_no_multiple_of_the_stream_is_not_exported():
    with pytest.raises(InputError, match="mamba2 has heads whose channels are together a multiple of d_model"):
        model = model_of(MAMBA, "x")
        config_of(model.model_copy(update={"d_model": 2048}), families()["mamba2"])
