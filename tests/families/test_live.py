"""Families against transformers itself, on random small models.

They run where torch and transformers are installed beside jaxlm (`make_fixtures.py` says which versions), and show what
no fixture was made of: options together, in any order of layers, at other sizes.
"""

import json
import warnings
from functools import cache

import jax
import meshes
import numpy as np
import pytest
from matrices import sampled
from random_configs import draw, path_dependent
from running import logits, save
from tiny_configs import old_spelling

from jaxlm import api
from jaxlm.families import directory, table
from jaxlm.families.directory import PublishedModel
from jaxlm.families.family import families
from jaxlm.families.settings import config_of, model_of
from jaxlm.models import tree
from jaxlm.parallel.rules import TRAIN

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
make_fixtures = pytest.importorskip("make_fixtures")

DRAWS = 20  # of each family, one of them in the quick suite
TOKENS = 16
DOCUMENTS = (21, 26)  # beyond the original contexts, and of one sequence's length together
MARGIN = 25 * make_fixtures.TOLERANCE  # between the two largest logits, of the largest of all: both may be off
NEOX = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 5, "num_attention_heads": 6,
    "max_position_embeddings": 8192,
}  # fmt: skip
SIZES = {
    "": NEOX | {"num_key_value_heads": 2},
    "gpt_neox": NEOX,
    "granitemoehybrid": NEOX | {"num_key_value_heads": 2, "mamba_n_heads": 6},
    "nemotron_h": {key: value for key, value in NEOX.items() if key != "num_hidden_layers"}
    | {"num_key_value_heads": 2, "hybrid_override_pattern": "M-*EM"},
    "mamba2": {"vocab_size": 97, "hidden_size": 48, "num_heads": 6, "head_dim": 16, "n_groups": 2},
    "gpt2": {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64},
}
CASES = [pytest.param(name, seed, id=f"{name}-{seed}") for name in families() for seed in range(DRAWS)]
QUICK = ("llama", "gemma3_text")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Keep torch's threads from waiting for one another, in models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", families())
def test_what_a_configuration_leaves_out_is_what_transformers_says(name):
    sizes = SIZES.get(name, SIZES[""])
    whole = json.loads(transformers.AutoConfig.for_model(name, **sizes).to_json_string())
    family = families()[name]
    left_out = model_of({"model_type": name, **sizes}, name)
    assert config_of(left_out, family) == config_of(model_of(whole, name), family)


@cache
def drawn(name, seed):
    """The settings of a random model, and transformers' own with loud weights."""
    settings, weights = draw(name, seed)
    return settings, make_fixtures.Reference(name, settings, weights, "loud")


@pytest.mark.parametrize(("name", "seed"), sampled(CASES, lambda name, seed: seed == 0))
def test_a_random_model_is_that_of_transformers(name, seed, tmp_path):
    """Names and logits are its own, of packed documents too, and it opens the export with these logits."""
    settings, reference = drawn(name, seed)
    model, family = model_of(reference.config, name), families()[name]
    local = settings.get("rope_parameters", {}).get("sliding_attention", {})
    if local.get("rope_type", "default") == "default":  # the old spelling has no other
        assert model_of(old_spelling("", reference.config), name) == model

    expected = table.tensors(model, family.rules)
    assert {key: list(held.shape) for key, held in expected.items()} == reference.tensors
    assert tree.parameter_count(model) == reference.model.num_parameters()

    sequences = [make_fixtures.drawn(reference, f"{name} {seed} {i}", sum(DOCUMENTS)) for i in range(2)]
    documents = [
        make_fixtures.drawn(reference, f"{name} {seed} document {i}", count) for i, count in enumerate(DOCUMENTS)
    ]
    exact = reference.logits(sequences)
    noise = error(reference.logits(sequences, exact=False), exact)
    tolerance = max(make_fixtures.TOLERANCE, 4 * noise)  # wide heads without norms or caps are noisier than fixtures
    apart = np.concatenate([reference.logits([document])[0] for document in documents])
    save(tmp_path, reference.config, reference.weights)
    parameters = PublishedModel(tmp_path).load(meshes.make(1, 1, 1), TRAIN, "float32")
    whole, restarting = [*range(sum(DOCUMENTS))], [i for count in DOCUMENTS for i in range(count)]
    with jax.set_mesh(meshes.make(1, 1, 1)):
        found = np.asarray(logits(model, parameters, [*sequences, sum(documents, [])], [whole, whole, restarting]))
    assert error(found[:2], exact) <= tolerance, noise
    assert error(found[2], apart) <= tolerance, noise

    again = opened(tmp_path / "export", model, parameters, family if seed % 2 else None)
    assert error(again(sequences), exact) <= tolerance, noise


@pytest.mark.parametrize(("name", "seed"), sampled(CASES, lambda name, seed: seed == 0 and name in QUICK))
def test_greedy_tokens_of_a_random_model_are_those_of_transformers(name, seed, tmp_path):
    settings, reference = drawn(name, seed)
    if path_dependent(settings, make_fixtures.PROMPT + TOKENS):
        pytest.skip("rotary positions depend on the length of a sequence")
    prompt, told = safe_continuation(reference, f"{name} {seed}")
    model = api.load(save(tmp_path, reference.config, reference.weights), ["execution.dtype=float32"])
    (answer,) = model.generate([prompt], len(told), temperature=0.0)
    assert list(answer.token_ids) == told


def error(found, exact):
    """The largest error, relative to the largest logit."""
    return np.abs(found - exact).max() / np.abs(exact).max()


def safe_continuation(reference, key):
    """The candidate whose greedy tokens are safe from rounding for longest, and these tokens."""
    rows, margins, _ = make_fixtures.continuations(reference, key, TOKENS)
    goes_on = np.array(rows).T[make_fixtures.PROMPT :] != reference.config["eos_token_id"]
    safe = np.minimum.accumulate((margins > MARGIN) & goes_on).sum(0)
    safe *= [reference.closest([row]) > make_fixtures.TIE / 10 for row in rows]
    best = int(safe.argmax())
    assert safe[best], "no choice is safe from rounding"
    return rows[best][: make_fixtures.PROMPT], rows[best][make_fixtures.PROMPT :][: safe[best]]


def opened(folder, model, parameters, family):
    """Return the logits that transformers has for an export, into a family or the plainest that has its parts."""
    carried = {}
    if family:
        ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
        carried = {"config.json": json.dumps(config_of(model, family) | ids | {"dtype": "float32"}).encode()}
    directory.write(folder, model, parameters, {"": "F32"}, carried, lambda line: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = make_fixtures.Reference.load(folder)

    def compute(rows):
        with torch.no_grad():
            return read(torch.tensor(rows), use_cache=False).logits.numpy()

    return compute
