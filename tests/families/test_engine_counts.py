"""The engine's steps of every family, counted to the last FLOP of their jaxprs."""

from dataclasses import replace

import engine_jaxprs
import expert_tiles
import loud
import pytest
from matrices import sampled
from workload_fixtures import workload

from jaxlm.costs.counted import cache, operations
from jaxlm.families.settings import model_of

CASES = [pytest.param(name, kind, id=f"{name}-{kind}") for name in loud.names() for kind in ("decode", "prefill")]


@pytest.mark.parametrize(("name", "kind"), sampled(CASES, ["gemma3-prefill", "gpt2-decode", "cohere2-decode"]))
def test_the_engine_s_steps_are_counted_to_the_last_flop(name, kind):
    """Three sequences over several pages, beyond windows; a prompt takes several steps."""
    model = model_of(loud.read(name)[0]["config"], name)
    tokens = min(model.context_length, 75)
    work = replace(workload(kind, model, 3, tokens, kernels="xla"), page=32, chunk_tokens=64)
    products = sum(step.matmul_flops for step in engine_jaxprs.costs(work))
    chosen = {layer.feed_forward.experts_per_token for layer in model.layers if layer.feed_forward.kind == "mixture"}
    if chosen:
        rows = {k * shape.rows for shape in engine_jaxprs.shapes(work) for k in chosen}
        assert expert_tiles.executed(operations.step(work), model, rows) == products
    else:
        assert sum(op.times * op.flops for op in operations.step(work)) == products
    assert cache.kv_cache(work) == engine_jaxprs.cache_bytes(work)
