"""An engine whose devices share out the rows of prompts (`mesh.context`): what they send is what is counted."""

import platform
import sys
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from engine_fixtures import check_pages
from matrices import sampled
from test_engine import FAMILIES, SETTINGS, make, requests, served
from workload_fixtures import workload

from jaxlm import api
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.traffic import PAGES, collectives
from jaxlm.costs.engine_steps import prefill_steps
from jaxlm.costs.search import layouts
from jaxlm.inference.cache_memory import CacheSize
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.step_shapes import TILE, StepShapes
from jaxlm.lowering import hlo
from jaxlm.lowering.collectives import collectives as compiled_collectives

PROMPT = 150
elsewhere = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="its compilers are for Linux on x86-64"
)


def of_family(family, **changes):
    return model_fixtures.model({**FAMILIES.get(family, {}), **changes}, context_length=160)


CASES = [("llama", {"context": 2}, None), ("llama", {"data": 2, "context": 2, "tensor": 2}, "int8")]
CASES += [("latent", {"context": 4}, None), ("mixture", {"expert": 2, "context": 2}, None)]
CASES += [("mixed", {"context": 2}, "int8"), ("gpt2", {"context": 8}, None)]


@pytest.mark.parametrize(
    ("family", "sizes", "cache_dtype"),
    sampled([pytest.param(*case) for case in CASES], lambda *case: case == CASES[1]),
    ids=str,
)
def test_devices_send_what_layers_keep_of_a_chunk_and_the_rows_of_draws(family, sizes, cache_dtype):
    """Whole heads are not gathered where devices have parts of them."""
    model, mesh, layout = of_family(family), meshes.make(**sizes), meshes.layout(**sizes)
    settings = replace(SETTINGS, slots=2 * layout["data"], cache_dtype=cache_dtype)
    programs = EnginePrograms.of(model, mesh, jnp.dtype("float32"), settings)
    sized = {"page": SETTINGS.page, "chunk_tokens": SETTINGS.chunk_tokens, "cache_dtype": cache_dtype}
    work = workload("prefill", model, settings.slots, PROMPT, "float32", layout=layout, kernels="xla", **sized)
    step = work.on_cpu().largest_step()
    shape = step.engine_steps.shape
    assert shape in programs.shapes.all() and shape.tiles == layout["context"] * SETTINGS.chunk_tokens // TILE
    pages = CacheSize(PROMPT, tuple(12 for _ in programs.layout.groups))
    found, counted = Counter(), Counter()
    program = hlo.parse(programs.step(shape, pages).compile().as_text(), trips=1)
    for each in compiled_collectives(program, dict(mesh.shape)):
        assert "context" not in each.axes or each.axes == ("context",)
        found[each.kind, each.axes] += each.count * each.bytes
    for each in collectives(replace(step, engine_steps=step.engine_steps._replace(times=1))):
        if each.of != "draws" or each.axes == ("context",):  # the draw is a program of its own
            counted[each.kind, each.axes] += each.times * each.bytes
    assert {axes: sent for axes, sent in found.items() if "context" in axes[1]} == {
        axes: sent for axes, sent in counted.items() if "context" in axes[1]
    }
    assert found.keys() == counted.keys()


@elsewhere
@pytest.mark.exhaustive
@pytest.mark.parametrize("chips", ["h200-sxm:8", "tpu-v5e:2x4"])
def test_a_large_model_sends_and_computes_on_chips_what_is_counted(chips):
    """Keys and values are gathered in the dtype of the pages, by each device of `tensor` those of its heads."""
    changes = ["inference.prompt=16384", "inference.sequences=2", "model.num_layers=2"]
    experiment = api.configure("llama3.1-8b", changes)
    report = api.compile(experiment, chips, mesh="context=4,tensor=2", workload="prefill").report
    row, counted = report.row(), report.plan.work.largest_step()
    assert row["flops_per_device"] == row["counted"]["flops_per_device"]
    memory = row["memory_bytes_per_device"]["peak"], row["counted"]["memory_bytes_per_device"]["total"]
    assert memory[0] == pytest.approx(memory[1], rel=0.02)  # 1.3 % on a TPU, which works with less than is counted
    sent = sum(each["count"] * each["bytes"] for each in row["collectives"] if each["axes"] == ["context"])
    assert sent == sum(each.times * each.bytes for each in collectives(counted) if each.axes == ("context",))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "dtype", "sizes", "cache_dtype"),
    [
        ("llama", "bfloat16", {"context": 2}, None),
        ("llama", "float32", {"context": 4}, "int8"),
        ("latent", "float32", {"context": 2}, None),
        ("gpt2", "float32", {"data": 2, "context": 4}, None),
        ("mixed", "float32", {"context": 2}, None),
        ("mixture", "float32", {"context": 2}, None),
    ],
    ids=str,
)
def test_any_model_gives_one_device_s_bits(family, dtype, sizes, cache_dtype):
    """Also where a prompt takes several steps, beside sequences that decode. In bfloat16 XLA rounds at other places in
    a program for several devices, whatever they share."""
    asked = [request._replace(max_tokens=4) for request in requests(6, longest=150)]
    alone = {} if dtype == "float32" else {"data": 2}
    one, several = (
        make(family, dtype, sizes=each, slots=4, chunk_tokens=32, cache_dtype=cache_dtype) for each in (alone, sizes)
    )
    assert several.check()
    assert served(several, asked) == served(one, asked)
    check_pages(several)


def test_rows_of_each_device_are_those_of_one():
    """A step reads as many more rows as devices share them out, and of a chunk all see about as many keys."""
    one, four = StepShapes(8, 512, 2), StepShapes(8, 512, 2, parts=4)
    assert [4 * tiles for tiles in one.tiles] == four.tiles
    assert [shape.on_device(4) for shape in four.all()] == one.all()
    (alone,), shared = (prefill_steps(shapes, 4096, 128, (None,)) for shapes in (replace(one, slots=1), four))
    (of_one, of_four) = (each.sections[1] for each in (alone, shared[-1]))
    assert of_four.queries == of_one.queries and of_four.sequences == of_one.sequences
    assert of_four.loops and of_one.loops


def test_states_are_not_shared_out():
    recurrent = of_family("llama", attention={"kind": "short_convolution"})
    refused = r"^mesh\.context = 2 shares out the rows of a prompt, which recurrent layers read in order: set it to 1"
    with pytest.raises(InputError, match=refused):
        EnginePrograms.of(recurrent, meshes.make(context=2), jnp.dtype("float32"), SETTINGS)
    for kind in ("decode", "prefill"):
        work = workload(kind, recurrent, 2, PROMPT, layout=meshes.layout(context=2))
        with pytest.raises(InputError, match=refused):
            collectives(work)
    assert not [layout for layout in layouts(work, 2) if layout["context"] > 1]


def test_a_search_shares_out_prompts_where_there_are_too_few_and_not_rows_that_decode():
    for kind, sizes in (("prefill", {1, 2}), ("decode", {1})):
        work = workload(kind, of_family("llama"), 2, PROMPT)
        assert {layout["context"] for layout in layouts(work, 4)} == sizes
    assert not [each for each in collectives(replace(work, layout=meshes.layout(context=2))) if each.of == PAGES]
