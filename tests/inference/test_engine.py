"""The engine's invariants, to the bit: a request's tokens, and the stream that they are drawn from, are its own."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from engine_fixtures import check_pages
from flax import nnx
from jax import monitoring
from matrices import sampled

from jaxlm import api
from jaxlm.core.errors import InputError
from jaxlm.inference.engine import Engine
from jaxlm.inference.paged_cache import PageLayout
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.scheduler import Full, NeverFits
from jaxlm.inference.settings import EngineSettings
from jaxlm.models import tree
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantizing import Quantizer
from jaxlm.parallel.rules import ENGINE, FORWARD

# An engine writes its layers out: two compile sooner than three, and have every kind of a family without MIXED.
FAMILIES = {name: {**family, "num_layers": 2} for name, family in model_fixtures.FAMILIES.items()}
FAMILIES["mixed"] = {**model_fixtures.MIXED, "num_layers": 4}
GATED = {**model_fixtures.MIXTURE["feed_forward"], "shared": {"d_ff": 16, "gate": "sigmoid"}}  # one number a token
FAMILIES["mixture"] = {**model_fixtures.MIXTURE, "feed_forward": GATED, "num_layers": 2}
FAMILIES |= model_fixtures.RECURRENT
SCALINGS = [
    {
        "kind": "longrope",
        "factor": 4.0,
        "original_context_length": 40,
        "short_factors": [1.0, 1.5],
        "long_factors": [1.0, 9.0],
    },
    {"kind": "dynamic", "factor": 2.0, "original_context_length": 40},
]
STORIES = Path(__file__).parents[1] / "families" / "stories260K"
SETTINGS = EngineSettings(slots=8, page=32, chunk_tokens=64)
SCORES = "logprob", "top", "top_logprob"
PAGES = 12  # in all, where 8 requests of the whole context would hold 40
KEPT = ["('mixed', 'float32')", "('mixture', 'float32')", "('latent', 'float32')", "('llama', 'float32', (2,))"]
KEPT += ["('mixture', 'float32', (), 'int8')"]
KEPT_NARROW = ["('llama', 'float32', (), None, 'int8')"]
CASES = [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")]
CASES += [
    ("llama", "float32", (2,)),
    ("mixed", "float32", (2, 2)),
    ("mixture", "float32", (2, 1, 2)),
    ("latent", "float32", (2, 1, 2)),
    ("llama", "bfloat16", (2, 1, 2)),
]  # on devices
CASES += [
    ("llama", "float32", (), "int8"),
    ("llama", "bfloat16", (), "int4"),
    ("gpt2", "float32", (), "w8a8"),
    ("llama", "bfloat16", (), "w8a8"),
    ("latent", "float32", (), "int8"),
    ("mixture", "float32", (), "int8"),
    ("mixture", "bfloat16", (), "fp8"),
    ("mixture", "float32", (2, 1, 2), "mxfp4"),
    ("mixture", "float32", (2, 1, 2), "w8a8"),
    ("mixed", "float32", (2, 1, 2), "fp8"),
    ("mixed", "float32", (2, 1, 2), "w8a8"),
]  # quantised
NARROW = [
    ("llama", "float32", (), None, "int8"),
    ("mixed", "float32", (), None, "fp8"),
    ("latent", "bfloat16", (), None, "int8"),
    ("mixture", "float32", (2, 1, 2), None, "int8"),
    ("llama", "bfloat16", (), "int4", "fp8"),
]  # with pages of eight bits


# Compared with a full pass in that dtype.
in_float32 = pytest.mark.parametrize(
    "engine", sampled([case for case in CASES if case[1] == "float32"], KEPT), indirect=True, scope="module", ids=str
)


def initial(model, mesh, quantized, dtype="float32"):
    parameters = tree.init(model, 0, mesh)
    if quantized is not None:
        return Quantizer(model, quantized, mesh, FORWARD, dtype).tree(parameters)
    return jax.tree.map(lambda x: x.astype(dtype), parameters)


def make(
    family="llama",
    dtype="float32",
    sizes=(),
    quantize=None,
    cache_dtype=None,
    valid_token_mask=None,
    pages=PAGES,
    **settings,
):
    """Return an engine on a mesh of these sizes; an id that is not known has an embedding of NaN. `pages`: those of
    each group that its memory would hold if all groups had as many."""
    mesh = meshes.make(**sizes) if isinstance(sizes, dict) else meshes.make(*sizes)
    model = model_fixtures.model(FAMILIES[family], context_length=160)
    quantized = quantize and Quantization(quantize, 32 * (quantize == "int4"))
    parameters = initial(model, mesh, quantized, dtype)
    layout = PageLayout.of(nnx.merge(*tree.abstract(model, unrolled=True)).slots(), SETTINGS.page, cache_dtype)
    each = sum(layout.page_bytes(group, jnp.dtype("float32"), mesh, ENGINE) for group in range(len(layout.groups)))
    settings = {"cache_bytes": pages * each, "cache_dtype": cache_dtype, **settings}
    if valid_token_mask is not None:
        parameters["embedding"] = jnp.where(valid_token_mask[:, None], parameters["embedding"], jnp.nan)
    options = {"valid_token_mask": valid_token_mask, "quantized": quantized}
    return Engine(model, parameters, mesh, replace(SETTINGS, **settings), **options)


@pytest.fixture(scope="module", params=sampled([*CASES, *NARROW], [*KEPT, *KEPT_NARROW]), ids=str)
def engine(request):
    return make(*request.param)


def requests(count=8, seed=0, longest=110):
    draw = np.random.default_rng(seed)
    return [
        Request(
            draw.integers(0, model_fixtures.VOCABULARY, draw.integers(1, longest)).tolist(),
            int(draw.integers(1, 24)),
            Sampling(temperature=0.9, top_k=20) if i % 2 else Sampling(temperature=0.0),
            stream=i,
        )
        for i in range(count)
    ]


def full_logits(engine, tokens):
    """Return the logits [T, V] after each token, from one forward pass in float32."""
    quantized = engine.runner.programs.quantized
    graph, _ = tree.abstract(engine.model, quantized=quantized)
    parameters = initial(engine.model, meshes.make(), quantized)
    return np.asarray(model_fixtures.full_logits(graph, parameters, tokens, engine.model.context_length))


def served(engine, asked, **options):
    """Return for each request the tokens drawn and the bits of the stream before each, all pages given back."""
    ids = [engine.submit(request._replace(hidden=True, **options), seed=7) for request in asked]
    found = {id: [] for id in ids}
    for event in engine.run():
        assert event.error is None
        if event.token is not None:
            found[event.id].append((event.token.id, event.hidden.tobytes()))
    check_pages(engine)
    assert not engine.pages_held
    assert [len(found[id]) for id in ids] == [request.max_tokens for request in asked]
    return [found[id] for id in ids]


# Two shards check themselves below, where a step reads one tile.
KEPT_CHECKED = [*KEPT[:3], *KEPT_NARROW, "('gpt2', 'float32', (), 'w8a8')"]


@pytest.mark.parametrize("case", sampled([*CASES, *NARROW], KEPT_CHECKED), ids=str)
def test_it_checks_itself(case):
    """An engine of its own: the check overwrites pages that others would find."""
    assert make(*case).check()


def test_it_checks_itself_where_a_step_reads_one_tile_of_prompts(monkeypatch):
    """Also where the pages of each shard hold other texts. It sees where rows depend on rows beside them."""
    engine = make(sizes=(2,), chunk_tokens=32)
    served(engine, requests(2, longest=40))
    read, runner = [], engine.runner
    read_rows = runner._read_rows
    monkeypatch.setattr(runner, "_read_rows", lambda shape, batch: read.append(shape) or read_rows(shape, batch))
    assert engine.check()
    assert len(read) <= 4 * len(set(read)) and {*runner.programs.shapes.all()} == {*read}

    def read_beside(shape, batch):
        texts = sum((section[:, 0] > 0).sum() for section in batch.tables[0])
        results = read_rows(shape, batch)
        return results._replace(logits_QV=results.logits_QV + float(texts > 2))  # one of each shard

    monkeypatch.setattr(runner, "_read_rows", read_beside)
    assert not engine.check()


def test_a_request_is_served_as_if_alone(engine):
    """Together with others, in another order, and by itself; the last of these finds its prompt in the cache."""
    asked = requests()
    together = served(engine, asked)
    assert served(engine, asked[::-1]) == together[::-1]
    alone = [served(engine, [request])[0] for request in asked[:3]]
    assert alone == together[:3] and engine.pages_cached


@in_float32
def test_greedy_tokens_are_those_of_the_full_pass(engine):
    (request, *_) = requests(longest=40)
    (drawn,) = served(engine, [request])
    logits = full_logits(engine, [*request.prompt, *[token for token, _ in drawn]])
    assert logits[len(request.prompt) - 1 : -1].argmax(axis=-1).tolist() == [token for token, _ in drawn]


def test_a_cache_too_small_for_all_changes_nothing(engine):
    """Generations lose their pages to others and read all again; alone none does. Penalties count what was drawn.

    Where all layers have windows, one that lacks a page waits until another frees one.
    """
    asked = [
        request._replace(
            prompt=request.prompt[:20], max_tokens=130, sampling=request.sampling._replace(frequency_penalty=0.3)
        )
        for request in requests(6)
    ]
    before = engine.preemptions
    together = served(engine, asked)
    assert engine.preemptions > before or None not in engine.runner.programs.layout.groups
    for i in (0, 5):
        assert served(engine, [asked[i]]) == [together[i]]


@in_float32
def test_scores_are_log_probabilities_of_the_prompt(engine):
    """Also of a prompt that is in the cache: its scores are computed anew."""
    prompt = requests(longest=90, seed=3)[2].prompt
    whole = full_logits(engine, prompt)
    for _ in range(2):
        for scores_from, following in ((0, 5), (40, 7), (len(prompt) - 1, 3), (50, None)):
            asked = Request(prompt, 1, Sampling(temperature=0.0), scores_from=scores_from, following=following)
            engine.submit(asked)
            after = [*prompt[1:], *([] if following is None else [following])]
            found = np.zeros((3, len(after)))
            for event in engine.run():
                if event.scores is not None:
                    first, logprob, rank, top, top_logprob = event.scores
                    assert first >= scores_from and rank is None and top.shape == top_logprob.shape == (len(logprob), 1)
                    found[:, first : first + len(logprob)] = logprob, top[:, 0], top_logprob[:, 0]
            logits = whole[: len(after)]
            expected, likeliest = np.asarray(jax.nn.log_softmax(logits, axis=-1)), logits.argmax(axis=-1)
            rows = np.arange(scores_from, len(after))
            # Logits up to 10 in float32, of sums in another order.
            np.testing.assert_allclose(found[0, rows], expected[rows, np.array(after)[rows]], rtol=0, atol=2e-5)
            assert found[1, rows].tolist() == likeliest[rows].tolist()
            np.testing.assert_allclose(found[2, rows], expected[rows, likeliest[rows]], rtol=0, atol=2e-5)


def random_request(draw, texts):
    """Return a request whose prompt begins as others do, for whole pages or a token more or less."""
    head = texts[draw.integers(len(texts))][: draw.choice([0, 1, 31, 32, 33, 64, 65, 95])]
    own = draw.integers(
        0, model_fixtures.VOCABULARY, draw.integers(1, 20) if len(head) < 32 else draw.choice([0, 1, 9])
    )
    prompt = [*head, *own.tolist()]
    sampling = Sampling(
        temperature=float(draw.choice([0.0, 0.9])),
        top_k=None if draw.random() < 0.5 else 20,
        frequency_penalty=float(draw.choice([0.0, 0.3])),
        logprobs=2,
    )
    return Request(
        prompt,
        int(draw.integers(1, 32)),
        sampling,
        stream=int(draw.integers(100)),
        stop_token_ids=draw.integers(0, model_fixtures.VOCABULARY, draw.integers(3)).tolist(),
        scores_from=int(draw.integers(len(prompt))) if draw.random() < 0.15 else None,
    )


def gathered(events):
    """Return the tokens of a request with their numbers and how it ends, and its scores, to the bit."""
    tokens = [(event.token, event.ended_by, event.end, event.error) for event in events if event.scores is None]
    scores = [event.scores for event in events if event.scores is not None]
    return tokens, [np.concatenate([getattr(each, name) for each in scores]).tobytes() for name in SCORES if scores]


def serve_at_random(engine, count, compared=None, seed=7):
    """Serve random requests, some of which go on from the texts of others, are cancelled or finished, and compare each
    with the same request alone, without a prefix. Return the ids that were cancelled or finished, and the prompts'
    tokens that were found."""
    draw, asked, found, cancelled = np.random.default_rng(seed), {}, {}, set()
    texts, turns, cached = draw.integers(0, model_fixtures.VOCABULARY, (3, 95)).tolist(), [], 0
    while len(asked) < count or not engine.is_idle:
        if len(asked) < count and (engine.is_idle or draw.random() < 0.1):
            for _ in range(min(draw.integers(1, 12), count - len(asked))):
                request = turns.pop() if turns and draw.random() < 0.5 else random_request(draw, texts)
                asked[id := engine.submit(request, seed=7, priority=int(draw.integers(3)))] = request
                found[id] = []
        going = [id for id in asked if id not in cancelled and not (found[id] and found[id][-1].end)]
        if going and draw.random() < 0.05:
            cancelled.add(id := int(draw.choice(going)))
            (engine.finish if id % 2 else engine.cancel)(id)
        for event in engine.step():
            found[event.id].append(event)
            if event.end:
                cached += event.cached
                drawn = [each.token.id for each in found[event.id] if each.token]
                turn = [*asked[event.id].prompt, *drawn, *range(int(draw.integers(1, 5)))]
                if len(turn) < 120:
                    turns.append(random_request(draw, texts)._replace(prompt=turn, scores_from=None))
        check_pages(engine)
    assert not engine.pages_held
    for id, request in [*asked.items()][:compared]:
        engine.submit(request, seed=7, salt=id.to_bytes(4, "big"))
        (tokens, scores), (alone, of_alone) = gathered(found[id]), gathered([*engine.run()])
        assert tokens == alone[: len(tokens)] and (id in cancelled or (len(tokens), scores) == (len(alone), of_alone))
    return cancelled, cached


def test_random_requests_and_cancellations_leave_no_page_in_use(engine):
    """Requests that are not cancelled have the tokens that they have alone."""
    cancelled, _ = serve_at_random(engine, 16, compared=4)
    assert cancelled


RANDOM = [
    pytest.param(family, 300, {"steps_per_dispatch": steps, **sizes})
    for family in ("delta", "mamba2", "mixed")
    for steps in (1, 4)
    for sizes in ({"pages": PAGES}, {"pages": 60, "state_interval": None if family == "mixed" else 64})
]
RANDOM += [
    pytest.param(family, 300, {"quantize": quantize, "pages": 60, "state_interval": 64})
    for family, quantize in (("delta", "w8a8"), ("mamba2", "int8"))
]


@pytest.mark.parametrize(
    "family, count, settings",
    sampled(
        [pytest.param("delta", 30, {"slots": 3, "pages": 7, "state_interval": 64}), *RANDOM],
        lambda _, count, __: count < 300,
    ),
    ids=str,
)
def test_random_requests_of_recurrent_layers_and_windows_are_served_as_if_alone(family, count, settings, request):
    """With prefixes that are found, and lost to others; interrupted, and in several steps of a dispatch. Before that
    the engine checks itself. Long tests run the machine code that users do."""
    if count == 300:
        request.getfixturevalue("as_users_compile")
    engine = make(family, **settings)
    assert engine.check()
    cancelled, cached = serve_at_random(engine, count, compared=count if count == 300 else 10)
    hits = engine.group_hits
    assert cancelled and cached and all(hit.found >= cached for hit in hits.values())
    assert [*hits] == {"delta": ["states", "attention"], "mamba2": ["states"], "mixed": ["attention", "window=3"]}[
        family
    ]
    is_tight = settings["pages"] <= PAGES and None in engine.runner.programs.layout.groups
    assert count < 300 or not is_tight or (engine.preemptions and (family != "delta" or hits["states"].lacked))


def test_each_option_is_the_request_s_own(engine):
    """Penalties, biases and log-probabilities, beside requests without; a request that repeats draws the same."""
    (plain,) = requests(1, longest=30)
    base = plain._replace(max_tokens=20)

    def drawn(*asked):
        ids = [engine.submit(request) for request in asked]
        found = {id: [] for id in ids}
        for event in engine.run():
            if event.token is not None:
                found[event.id].append(event.token)
        return [found[id] for id in ids]

    def greedy(**options):
        return base._replace(sampling=Sampling(temperature=0.0, **options))

    (without,) = drawn(greedy())
    often = max((token for token, *_ in without), key=[token for token, *_ in without].count)
    asked = [
        greedy(),
        greedy(repetition_penalty=100.0),
        greedy(presence_penalty=2.0, frequency_penalty=2.0),
        greedy(logit_bias={often: -100.0}),
        greedy(logprobs=2),
    ]
    same, repeated, penalised, biased, told = drawn(*asked)
    assert same == without and [token for token, *_ in told] == [token for token, *_ in without]
    assert all(drawn.logprob is None and drawn.top == () for drawn in without)
    assert all(drawn.top[0] == (drawn.id, pytest.approx(drawn.logprob)) and len(drawn.top) == 2 for drawn in told)
    assert often not in [token for token, *_ in biased]
    new = [token for token, *_ in repeated]
    assert len({*new}) == len(new) and not {*new} & {*base.prompt}
    assert penalised != without and drawn(*asked[::-1])[::-1] == [same, repeated, penalised, biased, told]


# Groups of pages, shards and quantised experts: what else a family has is within the same programs.
@pytest.mark.parametrize(
    "engine", sampled([*CASES, *NARROW], [KEPT[0], *KEPT[3:]]), indirect=True, scope="module", ids=str
)
def test_nothing_is_compiled_while_it_serves(engine):
    """Neither for options that need arrays of their own, nor for scores."""
    engine.warm(scores=True)
    compiled = []

    def listen(event, _, **__):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 41)(1)
        assert compiled.pop() and not compiled  # it hears
        penalised = [r._replace(sampling=Sampling(frequency_penalty=1.0, logprobs=3)) for r in requests(3, seed=9)]
        served(engine, penalised)
        served(engine, requests(2, seed=10), scores_from=0)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_programs_that_give_scores_read_prompts_without_scores_too(monkeypatch):
    """Warmed, an engine has one program of each size, and the same texts. The host fetches scores only if asked for."""
    engine = make(slots=2)
    fetched, read, device_get, step = [], set(), jax.device_get, engine.runner._step
    asked = requests(3, seed=9)
    before = served(engine, asked)

    def fetch(arrays):
        fetched.append(sum(x.nbytes for x in jax.tree.leaves(arrays)))
        return device_get(arrays)

    engine.warm(scores=True)
    monkeypatch.setattr(jax, "device_get", fetch)
    monkeypatch.setattr(engine.runner, "_step", lambda shape: read.add(shape) or step(shape))
    assert served(engine, asked) == before
    assert {(shape.tiles, shape.scores) for shape in read} == {(0, False), (2, True)}
    without = max(fetched)
    served(engine, asked, scores_from=0)
    assert max(fetched) >= without + 4 * SETTINGS.chunk_tokens


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"page": 40}, {}, "page of 40 tokens must be a multiple of 32"),
        ({"context": 160, "cache_bytes": 1000}, {}, "does not hold one sequence of 160 tokens, which needs"),
    ],
    ids=["page", "memory"],
)
def test_an_engine_that_could_not_serve_is_not_made(settings, changes, message):
    model = model_fixtures.model(**changes, context_length=160)
    with pytest.raises(InputError, match=message):
        Engine(model, tree.init(model, 0, meshes.make()), meshes.make(), replace(SETTINGS, **settings))


def test_what_cannot_be_served_is_refused_when_it_is_asked():
    engine = make(max_queued=2, max_queued_tokens=10, context=100)
    for request, message in {
        Request((1,) * 150, 12): "at most 11 tokens can follow",
        Request((1, model_fixtures.VOCABULARY), 1): "outside the vocabulary",
        Request((), 1): "the prompt is empty",
        Request((1,), 0): "max_tokens = 0 must be 1 or more",
    }.items():
        with pytest.raises(InputError, match=message):
            engine.submit(request)
    with pytest.raises(InputError, match="logit_bias = {99: …}: the id is outside"):
        engine.submit(Request([1], 1, Sampling(logit_bias={99: 1.0})))
    with pytest.raises(NeverFits, match="at most 100"):
        engine.submit(Request([1] * 90, 12))
    engine.submit(Request([1] * 90, 11))
    with pytest.raises(Full):
        engine.submit(Request([1], 1))
    engine.cancel(99)


@pytest.mark.exhaustive
def test_logits_that_are_not_finite_end_one_request_alone():
    """Beside others, whose pages it had before or has after them."""
    valid_token_mask = np.arange(model_fixtures.VOCABULARY) != 5
    engine = make(valid_token_mask=valid_token_mask)
    good = [Request([1, 2, 3], 9, Sampling(temperature=0.0)), Request([4] * 40, 9, Sampling(temperature=0.0))]
    expected = served(engine, good)
    bad = engine.submit(Request([5] * 45, 9))
    ids = [engine.submit(request._replace(hidden=True)) for request in good]
    found, errors = {id: [] for id in ids}, []
    for event in engine.run():
        if event.error:
            errors.append((event.id, event.end))
            assert "not finite" in str(event.error)
        elif event.token is not None:
            found[event.id].append((event.token.id, event.hidden.tobytes()))
    assert errors == [(bad, "error")] and [found[id] for id in ids] == expected
    check_pages(engine)
    assert not engine.pages_held and served(engine, good[::-1]) == expected[::-1]


@pytest.mark.exhaustive
def test_programs_of_many_rows_compute_a_row_as_those_of_few_do():
    assert make("llama", slots=64, chunk_tokens=512).check()


@pytest.mark.parametrize("scaling", sampled(SCALINGS, [str(SCALINGS[0])]), ids=lambda scaling: scaling["kind"])
def test_angles_are_of_the_length_that_a_text_may_have(scaling):
    """Keys of the prompt, which fills a page, are not found again by a text that may become too long for them."""
    model = model_fixtures.model(position={"kind": "rope", "scaling": scaling}, context_length=160, num_layers=1)
    parameters, prompt = tree.init(model, 0, meshes.make()), [*range(36)]
    engine = Engine(model, parameters, meshes.make(), replace(SETTINGS, slots=1))
    graph, _ = tree.abstract(model)
    for new in (2, 12):
        engine.submit(Request(prompt, new, Sampling(temperature=0.0)))
        drawn = [event.token.id for event in engine.run()]
        read = [*prompt, *drawn[:-1]]
        logits = np.asarray(model_fixtures.full_logits(graph, parameters, read, len(read)))
        assert logits[len(prompt) - 1 :].argmax(axis=-1).tolist() == drawn


@pytest.mark.exhaustive  # tests/cli/test_published.py has these tokens
def test_a_published_model_tells_its_story():
    """200 greedy tokens that others computed from these weights in float32."""
    ids = json.loads((STORIES / "stories260K_tokens.json").read_text())["tokens"]
    model = api.load(STORIES, dtype="float32")
    settings = replace(SETTINGS, context=256)
    engine = Engine(model.config, model.parameters, model.mesh, settings, kernels="xla")
    engine.submit(Request(ids[:1], 200, Sampling(temperature=0.0)))
    assert [event.token.id for event in engine.run() if event.token is not None] == ids[1:201]
