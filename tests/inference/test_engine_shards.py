"""An engine on several devices: sequences are sharded over the axes of a batch, weights over the others."""

import math

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from matrices import sampled
from test_engine import FAMILIES, SETTINGS, make, requests, served

from jaxlm.inference.cache_memory import CacheSize
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.requests import Request, Sampling
from jaxlm.inference.step_shapes import TILE, StepShape
from jaxlm.lowering import hlo
from jaxlm.lowering.collectives import axes_of, groups, kind_of
from jaxlm.lowering.matmul_flops import instruction_flops

MESHES = [(2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 2, 2), (1, 1, 2), (1, 1, 8), (2, 2, 2)]
MESHES += [{"data": 2, "context": 2}, {"context": 4}, {"data": 2, "context": 2, "tensor": 2}]


@pytest.mark.parametrize("family", ["llama", pytest.param("mixed", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("sizes", sampled(MESHES, [str(MESHES[7])]), ids=str)
def test_several_devices_draw_what_one_does(sizes, family):
    """To the bit where each has the whole of a layer; also where the sequences of one shard ask for what those of
    another do not."""
    asked = [
        request._replace(max_tokens=8, sampling=request.sampling._replace(logprobs=logprobs, top_p=top_p))
        for request, logprobs, top_p in zip(
            requests(5, longest=60), (2, None, None, None, None), (None, None, None, 0.9, None), strict=True
        )
    ]
    layout = meshes.layout(**sizes) if isinstance(sizes, dict) else meshes.layout(*sizes)
    one, several = (make(family, sizes=each, slots=4) for each in ((), sizes))
    for expected, found in zip(served(one, asked), served(several, asked), strict=True):
        assert [token for token, _ in found] == [token for token, _ in expected]
        hidden = ([np.frombuffer(bits, np.float32) for _, bits in each] for each in (found, expected))
        model_fixtures.assert_same_numbers(*hidden, 1e-5 if layout["tensor"] > 1 else 0.0)
    assert len(several.pages) == layout["data"] * layout["fsdp"]
    for expected, found in zip(scored(one), scored(several), strict=True):
        np.testing.assert_array_equal(found.rank, expected.rank)
        np.testing.assert_array_equal(found.top, expected.top)
        np.testing.assert_allclose(found.top_logprob, expected.top_logprob, atol=1e-5)


def scored(engine):
    """Return what the tokens of some prompts cost, of one of them with ranks."""
    asked = [Request([n + 1] * 9, 1, Sampling(0.0), scores_from=0, ranks=n == 1) for n in range(3)]
    ids = [engine.submit(request) for request in asked]
    found = {event.id: event.scores for event in engine.run() if event.scores}
    return [found[id] for id in ids]


def test_what_is_asked_of_an_engine_is_divided_and_added_up():
    """Slots over the shards, pages in all; scores and streams come from each shard."""
    engine = make("llama", sizes=(2,), slots=5)
    assert engine.runner.programs.slots == 3 and len(engine.pages) == 2
    prompts = [[shard + 1] * 40 for shard in range(2)]
    asked = [
        Request(prompt, 2, Sampling(0.0), scores_from=0, following=3, ranks=bool(shard), hidden=True)
        for shard, prompt in enumerate(prompts)
    ]
    found = {}
    for together in (asked, asked[:1], asked[1:]):
        ids = {engine.submit(request): request.prompt[0] for request in together}
        for event in engine.run():
            assert event.error is None
            of = found.setdefault((len(together), ids[event.id]), [])
            of.append((event.token and event.token.id, event.hidden is not None and event.hidden.tobytes()))
            of += [each is not None and each.tobytes() for each in event.scores[1:]] if event.scores else []
        if together is asked:
            assert engine.pages_cached == 2 and [sum(pages.cached) for pages in engine.pages] == [1, 1]
    assert not engine.pages_held
    assert [found[2, n] for n in (1, 2)] == [found[1, n] for n in (1, 2)]


def programs(sizes):
    model = model_fixtures.model(FAMILIES["llama"], context_length=160)
    return EnginePrograms.of(model, meshes.make(*sizes), jnp.dtype("float32"), SETTINGS)


def of_program(compiled, mesh):
    """Return the FLOPs of products on one device, loops once, and the collectives by kind and mesh axes."""
    flops, exchanges = 0, []
    for computation in hlo.parse(compiled.as_text()).computations.values():
        for instruction in computation.instructions.values():
            flops += instruction_flops(computation, instruction)
            if kind := kind_of(instruction):
                axes, _ = axes_of(groups(instruction, mesh.size), mesh.shape)
                exchanges += [(kind, axes, sum(each.elements for each in instruction.arrays))] if axes else []
    return flops, exchanges


@pytest.mark.parametrize("sizes", sampled([(2,), (1, 2), (2, 1, 2), (2, 2, 2)], ["(2, 1, 2)"]), ids=str)
def test_shards_exchange_nothing_in_a_step_and_tokens_in_a_draw(sizes):
    """Each has the products of its own rows, and memory for its own pages."""
    alone, sharded = programs((1, 1, *sizes[2:])), programs(sizes)
    shards = math.prod(sizes[:2])
    cache = CacheSize(160, tuple(24 // shards for _ in alone.layout.groups))
    for tiles in (0, 2):
        (flops, before), (shard_flops, exchanges) = (
            of_program(each.step(StepShape(each.slots, count, TILE), size).compile(), each.mesh)
            for each, count, size in ((alone, shards * tiles, cache._replace(counts=(24,))), (sharded, tiles, cache))
        )
        assert {axes for _, axes, _ in exchanges} <= {("tensor",)} and len(exchanges) == len(before)
        assert flops / shards <= shard_flops < 1.2 * flops / shards  # the products of few rows are padded
    _, exchanges = of_program(sharded.draw(sharded.slots).compile(), sharded.mesh)
    whole = [("all-gather", ("tensor",), sharded.slots * sharded.model.vocab_size)] if len(sizes) > 2 else []
    assert [each for each in exchanges if each[1] == ("tensor",)] == whole  # the logits, once
    over_shards = [(kind, elements) for kind, axes, elements in exchanges if axes != ("tensor",)]
    assert {kind for kind, _ in over_shards} <= {"all-gather", "all-reduce"} and len(over_shards) <= 5  # an array each
    assert max(elements for _, elements in over_shards) <= 20 * shards * sharded.slots
    assert shards * page_elements(sharded, cache) == page_elements(alone, cache._replace(counts=(24,)))


OF_EXPERTS = [
    pytest.param({"expert": 2}, None, marks=pytest.mark.exhaustive),
    ({"expert": 2, "tensor": 2}, None),
    pytest.param({"data": 2, "expert": 4}, None, marks=pytest.mark.exhaustive),
    pytest.param({"expert": 2, "tensor": 2}, "int8", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("sizes", "quantize"), OF_EXPERTS, ids=str)
def test_devices_that_share_out_experts_give_one_device_s_scores(sizes, quantize):
    """They have the same rows, each the experts of its own, and send sums of rows, never a matrix."""
    asked = [Request([*range(i, 40 + 9 * i)], 4, Sampling(0.0), scores_from=0) for i in range(3)]

    def scores(sizes):
        engine = make("mixture", sizes=sizes, quantize=quantize)
        ids = [engine.submit(request) for request in asked]
        by_request = {id: [] for id in ids}
        for event in engine.run():
            assert event.error is None
            by_request[event.id] += [each for each in (event.scores or ())[1:] if each is not None]
        return engine, [np.hstack([np.ravel(each) for each in by_request[id]]) for id in ids]

    engine, of_mesh = scores(sizes)
    for found, expected in zip(of_mesh, scores(())[1], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)  # sums in another order: 2e-6 seen
    programs = engine.runner.programs
    cache = CacheSize(160, tuple(24 for _ in programs.layout.groups))
    _, exchanges = of_program(programs.step(StepShape(programs.slots, 0, TILE), cache).compile(), programs.mesh)
    if quantize is None:
        smallest = min(x.size for x in jax.tree.leaves(programs.abstract_parameters()) if x.ndim == 4)
        assert exchanges and max(elements for *_, elements in exchanges) < smallest


def page_elements(programs, cache):
    """Return the elements of all pages on one device."""
    pages = programs.abstract_pages(cache)
    local = jax.tree.map(
        lambda x, sharding: math.prod(sharding.shard_shape(x.shape)), pages, programs.page_shardings(cache)
    )
    return sum(jax.tree.leaves(local))
