"""Requests of several adapters in one engine: each has its own numbers, and nothing of the others."""

import functools

import adapter_fixtures
import jax
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import check_pages
from matrices import sampled

from jaxlm.core.errors import InputError
from jaxlm.inference.adapters import NamedAdapter, adapter_set
from jaxlm.inference.draft_model import DraftModel
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.settings import EngineSettings, Speculation
from jaxlm.models import tree
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantizing import Quantizer
from jaxlm.parallel.rules import FORWARD

FAMILIES = {name: {**family, "num_layers": 2} for name, family in model_fixtures.FAMILIES.items()}
FAMILIES["mixed"] = {**model_fixtures.MIXED, "num_layers": 4}
FAMILIES["mixture"] = {**model_fixtures.MIXTURE, "num_layers": 2}
LORAS = {
    "x": LoraConfig(rank=4, alpha=8.0),
    "y": LoraConfig(rank=3, alpha=3.0, targets=("*/attention/query", "*/attention/value")),
}
SERVED = [None, "x", "y", None, "x", "y"]  # by the requests of a test


def model_of(family):
    return model_fixtures.model(FAMILIES[family], context_length=160)


def adapter(model, name):
    return adapter_fixtures.adapter(name, model, LORAS[name], ord(name))


@functools.cache
def merged(model, name):
    """Return a base, or the sums of a base and an adapter."""
    base = tree.init(model, 0, meshes.make())
    if name is None:
        return base
    beside = tree.under_adapters(base, tree.targets(model, LORAS[name]))
    whole = tree.joined(beside, jax.device_put(adapter_fixtures.trained(model, LORAS[name], ord(name))))
    return tree.merged(model, LORAS[name], whole, meshes.make(), FORWARD)


def greedy(model, request, drawn):
    """Return the likeliest tokens in the places of those that were drawn, by a full pass of summed matrices."""
    tokens, first = [*request.prompt, *drawn], len(request.prompt) - 1
    graph, _ = tree.abstract(model)
    logits = model_fixtures.full_logits(graph, merged(model, request.adapter), tokens, model.context_length)
    return np.asarray(logits)[first:-1].argmax(-1).tolist()


def make(family="llama", names=("x", "y"), dtype="float32", sizes=(), quantize=None, draft=None, **settings):
    """Return an engine of a base with these adapters."""
    model, mesh = model_of(family), meshes.make(**sizes) if isinstance(sizes, dict) else meshes.make(*sizes)
    quantized = quantize and Quantization(quantize)
    parameters = tree.init(model, 0, mesh)
    if quantized:
        parameters = Quantizer(model, quantized, mesh, FORWARD, dtype).tree(parameters)
    else:
        parameters = jax.tree.map(lambda x: x.astype(dtype), parameters)
    options = {"quantized": quantized, "draft": draft, "adapters": [adapter(model, name) for name in names]}
    return Engine(model, parameters, mesh, EngineSettings(**{**SETTINGS, **settings}), **options)


SETTINGS = {"slots": 8, "page": 32, "chunk_tokens": 32}


def requests(names=SERVED, longest=60):
    draw = np.random.default_rng(0)
    return [
        Request(
            draw.integers(0, model_fixtures.VOCABULARY, draw.integers(1, longest)).tolist(),
            int(draw.integers(6, 12)),
            Sampling(temperature=0.0),
            adapter=name,
        )
        for name in names
    ]


def served(engine, asked):
    """Return for each request the tokens and the stream before each, all pages given back."""
    ids = [engine.submit(request._replace(hidden=True)) for request in asked]
    found = {id: [] for id in ids}
    for event in engine.run():
        assert event.error is None
        found[event.id].append((event.token.id, event.hidden))
    check_pages(engine)
    assert not engine.pages_held
    return [found[id] for id in ids]


def bits(text):
    return [(token, hidden.tobytes()) for token, hidden in text]


CASES = [("llama", "float32", (), None), ("gpt2", "float32", (), None), ("mixed", "float32", (), None)]
CASES += [("mixture", "float32", (2, 1, 2), None), ("llama", "bfloat16", (), "int8"), ("llama", "float32", (2, 1, 2))]
CASES += [("llama", "float32", (), "int8"), ("llama", "float32", (), "w8a8"), ("llama", "float32", {"context": 2})]


@pytest.mark.parametrize("case", sampled(CASES, ["('llama', 'float32', (), None)"]), ids=str)
def test_each_request_is_served_with_its_own_adapter(case, request):
    """Together as alone, to the bit; the base's as without adapters, to the bit; and in float32 those of an adapter as
    by the sums of its matrices, to the order of sums. With norms of queries and keys in the machine code that users
    run: there a sum of squares depended on whether an adapter may be added to what is squared."""
    family, dtype, *how = case
    if family == "mixed":
        request.getfixturevalue("as_users_compile")
    engine, asked = make(family, ("x", "y"), dtype, *how), requests()
    assert engine.check()
    together = [*map(bits, served(engine, asked))]
    assert [bits(served(engine, [each])[0]) for each in asked[::-1]] == together[::-1]
    assert engine.pages_cached
    plain = make(family, (), dtype, *how)
    assert [bits(text) for text in served(plain, [r for r in asked if not r.adapter])] == together[::3]
    if dtype == "float32" and engine.runner.programs.quantized is None:
        for each, text in zip(asked, together, strict=True):
            assert [token for token, _ in text] == greedy(engine.model, each, [token for token, _ in text])


@pytest.mark.exhaustive
def test_an_adapter_is_served_as_where_it_is_the_only_one():
    asked = requests()
    together = [bits(text) for text in served(make(), asked)]
    for at, name in enumerate(LORAS, 1):
        assert [bits(text) for text in served(make(names=[name]), asked[at::3])] == together[at::3]


def test_no_prefix_is_found_under_another_adapter():
    """Page by page, each is found again under its own."""
    engine = make()
    (request,) = requests([None], longest=2)
    request = request._replace(prompt=[*range(50)] * 2, max_tokens=2)

    def cached(name):
        engine.submit(request._replace(adapter=name))
        return next(event.cached for event in [*engine.run()] if event.token)

    assert [cached(name) for name in (None, "x", "y")] == [0, 0, 0]
    assert [cached(name) for name in ("y", None, "x")] == [96, 96, 96]
    first = [bits(text) for text in served(engine, [request._replace(adapter=name) for name in (None, "x", "y")])]
    assert first == [bits(served(make(), [request._replace(adapter=name)])[0]) for name in (None, "x", "y")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{}, {"context": 2}], ids=str)
@pytest.mark.parametrize("source", ["ngram", "itself"])
def test_drafts_change_no_text_of_an_adapter(source, sizes):
    """A draft model draws without adapters: of the base its drafts are right, and of an adapter they may be. Also where
    devices share out the rows of prompts."""
    asked, model = requests(), model_of("llama")
    texts = [bits(text) for text in served(make(), asked)]
    draft = None if source == "ngram" else DraftModel(model, tree.init(model, 0, meshes.make(**sizes)))
    drafting = make(sizes=sizes, speculation=Speculation(source, 2), draft=draft)
    assert [bits(text) for text in served(drafting, asked)] == texts
    assert drafting.accepted or not draft


WRONG = {
    "two adapters are called x": lambda x: [x, x],
    "adapter z: it adapts no matrix": lambda x: [NamedAdapter("z", {})],
    "layers/attention/nothing is no matrix of the model": lambda x: [
        NamedAdapter("z", {"layers/attention/nothing": x.matrices["layers/attention/query"]})
    ],
    r"A \[2, 32, 4\] and B \[2, 4, 48\] of layers/feed_forward/down should be \[2, 48, 4\]": lambda x: [
        NamedAdapter("z", {"layers/feed_forward/down": x.matrices["layers/feed_forward/up"]})
    ],
    "numbers of layers/feed_forward/up are not finite": lambda x: [
        NamedAdapter("z", {"layers/feed_forward/up": tuple(m * np.inf for m in x.matrices["layers/feed_forward/up"])})
    ],
}


@pytest.mark.parametrize("message", WRONG)
def test_adapters_that_do_not_fit_are_refused(message):
    model = model_of("llama")
    with pytest.raises(InputError, match=message):
        adapter_set(model, WRONG[message](adapter(model, "x")))


def test_adapters_of_latent_keys_are_refused():
    model = model_of("latent")
    with pytest.raises(InputError, match="attention/key is multiplied head by head with latents"):
        adapter_set(model, [adapter(model, "x")])


def test_an_adapter_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="there is no adapter 'z'; take x, y"):
        make().submit(Request([1], 1, adapter="z"))
