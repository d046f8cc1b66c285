"""The search over all mesh axes, of which it looks at a part."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from workload_fixtures import workload

from jaxlm import config
from jaxlm.config import mesh_layout
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.plan_order import TIE
from jaxlm.costs.search import best_on, search, variants
from jaxlm.costs.workload import Workload
from jaxlm.parallel import layout_choice
from jaxlm.parallel.layout import Layout


@pytest.mark.parametrize(
    ("name", "chips", "batch", "sequence"),
    [
        ("llama3.1-8b", "h200-sxm:8", 16, 4096),
        ("llama3.1-8b", "h100-sxm5:16", 2, 32768),  # fewer sequences than devices
        pytest.param("llama3.1-70b", "h100-sxm5:32", 32, 8192, marks=pytest.mark.exhaustive),  # little memory
        pytest.param("mixtral-8x7b", "h100-sxm5:32", 32, 4096, marks=pytest.mark.exhaustive),
    ],
)
def test_a_search_finds_the_best_of_all_meshes_and_settings(name, chips, batch, sequence):
    """It looks at some alone of those with stages and shared sequences."""
    target = Target.parse(chips)
    model = config.load(name).model.model_copy(update={"num_layers": 16})
    work = workload("train", model, batch, sequence)
    work, best = work.on(target.chip), math.inf
    axes = {axis for d in work.parameters.values() for axis in d.axes}
    for layout in layout_choice.layouts(target.devices, work.rules, axes):
        on_mesh = replace(work, layout=layout)
        parts = layout["context"]
        if batch % on_mesh.batch_shards or (parts > 1 and sequence % (2 * parts)):
            continue
        if not layout_choice.divides(layout, work.rules, mesh_layout.divided_by_mesh(model)):
            continue
        for each in variants(on_mesh):
            if (planned := plan(each, target)).leaves_headroom:
                best = min(best, planned.time.expected)
    assert math.isfinite(best)
    assert search(work, target)[0].time.expected <= best * (1 + TIE)


@pytest.mark.parametrize(
    ("name", "batch", "sequence", "best"),
    [
        pytest.param("mixtral-8x7b", 64, 4096, 10, marks=pytest.mark.exhaustive),
        ("qwen3-0.6b", 512, 2048, 3),  # of those nearly as fast as the fastest, a simpler one is first
    ],
)
def test_what_a_search_leaves_out_is_not_among_the_best(monkeypatch, name, batch, sequence, best):
    """It leaves out meshes that are slower with all activations kept in one microbatch than the best in any way, by
    more than a tie, of which the simplest comes first."""
    target, found = Target.parse("h100-sxm5:64"), []
    work = workload("train", config.load(name).model, batch, sequence)
    for limit in (best, 10**6):
        monkeypatch.setattr("jaxlm.costs.search.BEST", limit)
        found.append([each.work for each in search(work, target)])
    some, every = found
    assert best <= len(some) < len(every) / 2
    assert some[:best] == every[:best]


@pytest.mark.parametrize(
    ("layers", "batch", "mesh", "microbatches", "rounds"),
    [
        (16, 64, Layout(pipeline=2, fsdp=8), 4, 4),
        pytest.param(32, 128, Layout(pipeline=4, fsdp=4), 8, 8, marks=pytest.mark.exhaustive),
    ],
)
def test_a_search_varies_microbatches_rounds_and_gathers_of_a_pipeline_together(
    layers, batch, mesh, microbatches, rounds
):
    """In rounds fewer microbatches are best: 8 and 16 are without rounds."""
    target, model = Target.parse("h100-sxm5:16"), config.load("llama3.1-8b").model
    work = workload("train", model.model_copy(update={"num_layers": layers}), batch, 2**18 // batch).on(target.chip)
    found, on_mesh = best_on(mesh, work, target).work, replace(work, layout=mesh)
    changes = itertools.product([2**n for n in range((layers // found.stages).bit_length())], ("tick", "step"))
    every = [
        plan(each, target)
        for rounds, gather in changes
        for each in variants(on_mesh.with_execution(pipeline_rounds=rounds, pipeline_gather=gather))
    ]
    best = min((each for each in every if each.leaves_headroom), key=lambda each: each.time.expected).work
    assert found.overrides() == best.overrides()
    expected = microbatches, "none", rounds, True
    assert (found.microbatches, found.remat, found.rounds, found.gathers_once) == expected
    assert found.overrides().endswith(f" execution.pipeline_rounds={rounds} execution.pipeline_gather=step")
    fixed = search(work, target, ["rounds", "gather"])
    assert not any(each.work.rounds > 1 or each.work.gathers_once for each in fixed)


def test_it_moves_a_factor_of_one_axis_to_another():
    found = set(layout_choice.neighbours(Layout(fsdp=6), ("pipeline", "fsdp")))
    assert found == {Layout(pipeline=2, fsdp=3), Layout(pipeline=3, fsdp=2)}


def test_a_run_without_stages_is_offered_none():
    target = Target.parse("h100-sxm5:6")
    work = workload("train", config.load("llama3.1-8b").model, 2, 8192)
    assert max(plan.work.stages for plan in search(work, target)) > 1
    assert all(plan.work.stages == 1 for plan in search(work, target, staged=False))


def test_the_page_has_the_figures_of_its_picture():
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    for name, chips, mesh in (
        ("llama3.1-70b", "h100-sxm5:512", Layout(fsdp=512)),
        ("llama3.1-70b", "h100-sxm5:512", Layout(fsdp=256, context=2)),
        ("qwen3-235b-a22b", "tpu-v5p:1024", Layout(fsdp=512, tensor=2)),
    ):
        found = best_on(mesh, Workload("train", config.load(name).model, 512, 8192), Target.parse(chips))
        assert f"{100 * found.mfu:.1f} %" in page
    assert best_on(Layout(fsdp=1024), Workload("train", found.work.model, 512, 8192), Target.parse(chips)) is None


def test_the_page_has_the_times_of_a_long_prompt():
    page = " ".join((Path(__file__).parents[2] / "docs" / "parallelism.md").read_text().split())
    found = []
    for mesh in (Layout(), Layout(context=8), Layout(context=4, tensor=2), Layout(tensor=8)):
        target = Target.parse(f"h200-sxm:{mesh.size}")
        work = Workload("prefill", config.load("llama3.1-8b").model, 1, 131_072, layout=mesh)
        found.append(plan(work.on(target.chip), target))
    one, by_context, by_both, by_tensor = (each.time.expected for each in found)
    assert f"in {one:.1f} s on one device, on 8 in {by_context:.1f} s with `context=8`, in {by_both:.1f} s" in page
    assert f"with `context=4,tensor=2`, and in {by_tensor:.2f} s with `tensor=8`" in page
    caches = "{:.0f}, {:.0f} and {:.0f} GiB".format(*(each.memory.kv_cache / 2**30 for each in found[1:]))
    assert f"the caches there are {caches} on a device" in page
