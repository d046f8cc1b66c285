"""The counted step of a model whose layers lie on the stages of a pipeline."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import model_fixtures
import pytest
from workload_fixtures import workload

from jaxlm import config
from jaxlm.cli import main
from jaxlm.core import units
from jaxlm.core.errors import InputError
from jaxlm.costs.counted import operations, traffic
from jaxlm.costs.counted.between_stages import slot_numbers
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.stack import JAXLM
from jaxlm.costs.stages import stage_layers
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import Layout

MODELS = Path(__file__).parents[2] / "configs" / "models"


def test_slots_of_stages():
    """Three dense layers of DeepSeek-V3 lie outside of the stages."""
    for name, stages, expected in (("llama3.1-405b", 16, (8, 2, 8)), ("deepseek-v3", 8, (8, 6, 11))):
        model = config.load(MODELS / f"{name}.toml").model
        staged = stage_layers(model, stages)
        assert (staged.slots, staged.idle, staged.model.num_layers) == expected
        assert stage_layers(model, 1).model == model
    with pytest.raises(InputError, match=r"set mesh.pipeline to 1"):
        stage_layers(model_fixtures.model(model_fixtures.MIXED), 2)
    wide = {"feed_forward": {"d_ff": 64}}
    last = [{"name": "all", "layers": 4}, {"name": "last", "layers": 1} | wide]
    with pytest.raises(InputError, match=r"^a pipeline needs .* the last of the model: set mesh.pipeline to 1$"):
        stage_layers(model_fixtures.model(num_layers=5, pattern=last), 2)


def on_stages(stages=4, microbatches=8, rounds=1, batch=16, layers=8):
    layout, model = Layout(pipeline=stages, fsdp=2), model_fixtures.model(num_layers=layers)
    work = workload("train", model, batch, 32, layout=layout, microbatches=microbatches)
    return work.with_execution(pipeline_rounds=rounds)


def test_passes_of_a_stage_are_counted_with_those_that_are_idle():
    work = on_stages()
    times = Counter()
    for op in operations.step(work):
        if op.product and op.scope.endswith("feed_forward/down"):
            times[op.phase] += op.times
    slots, passes = 2, 8 + 3
    # The forward pass before the backward pass runs from the kept input of the stage.
    assert times == {"forward": slots * passes, "rematerialised": slots * passes, "backward": 2 * slots * passes}
    busy = [op for op in operations.step(replace(work, counts_idle=False)) if op.phase == "forward" and op.product]
    assert {op.times for op in busy} <= {8, slots * 8}


def test_a_layer_that_is_written_out_does_not_run_again_what_nothing_reads():
    """The last product of a chunk's last layer, whose result the next stage has. XLA drops it, to the last FLOP: for
    Llama 3.1 8B with 16 layers on 4 stages of H100s, one product in each of 11 passes, or of 19 with two rounds."""
    for rounds, slots in ((1, 2), (2, 1)):
        work = on_stages(rounds=rounds).with_execution(scan_layers=False)
        times = Counter()
        for op in operations.step(work):
            if op.product and op.phase == "rematerialised":
                times[op.scope] += op.times
        passes = work.ticks.passes
        assert times.pop("layers/feed_forward/down", 0) == (slots - 1) * passes
        assert times["layers/feed_forward/up"] == slots * passes


def test_a_chunk_of_one_layer_makes_again_what_its_backward_pass_keeps():
    """XLA drops the rest, to the last FLOP, though layers of longer chunks are in a loop: all with `remat` "full"."""
    shares = []
    for remat in ("full", ("query", "key", "value"), "none"):
        work = on_stages(rounds=2).with_execution(scan_layers=True, remat=remat)
        times, passes = Counter(), work.ticks.passes
        for op in operations.step(work):
            if op.product and op.phase == "rematerialised":
                times[op.scope.rpartition("/")[2]] += op.times
        assert (times["query"], times["up"], times["down"]) == (passes, passes, 0)
        each, once = (
            sum(c.times * c.bytes for c in traffic.collectives(work) if (c.kind, c.of) == ("all-gather", "layers"))
            for work in (work, work.with_execution(pipeline_gather="step"))
        )
        shares.append(each / (passes * once / work.rounds))
    full, named, none = shares
    assert full == 2 < named < none < 3


@pytest.mark.parametrize(("rounds", "passes"), [(1, 8 + 3), (2, 2 * 8 + 3)])
def test_what_stages_send_is_counted(rounds, passes):
    residual = 2 * 1 * 32 * 32  # one row on each device
    sent = [each for each in traffic.collectives(on_stages(rounds=rounds)) if each.of == "stages"]
    assert Counter((each.kind, each.times, each.bytes) for each in sent) == {
        ("collective-permute", passes, residual): 2,
        ("all-reduce", 8, residual): 1,
        ("all-reduce", 8 + 4, residual): 1,
    }


@pytest.mark.parametrize(
    ("stages", "rounds", "kind", "times"),
    [
        (4, 1, "", 0),
        (3, 1, "all-to-all", 1),
        (3, 2, "all-to-all", 1),
        (4, 2, "collective-permute", 2),
        (2, 3, "all-to-all", 2),
    ],
)
def test_matrices_move_to_other_stages_than_they_are_stored_on(stages, rounds, kind, times):
    """Chunk by chunk; where some are not full all at once, from their stages with another dimension sharded first."""
    work = on_stages(stages, 2 * stages, rounds)
    sent = [each for each in traffic.collectives(work) if each.of == "slots"]
    whole = slot_numbers(work).in_slots // (rounds if kind == "collective-permute" else 1)
    assert [each[:1] + each[2:4] for each in sent] == [
        (kind, times, size * whole) for size in (2, 4)[: 2 * bool(times)]
    ]


def test_a_chunk_has_a_part_of_the_layers_of_a_stage():
    """It runs as often as there are rounds; what is before and after the stages does not."""
    once, twice = on_stages(layers=16), on_stages(layers=16, rounds=2)
    assert (once.stage_layers.slots, twice.stage_layers.slots) == (4, 2)
    busy = [replace(work, counts_idle=False) for work in (once, twice)]
    assert len({sum(op.times * op.flops for op in operations.step(work)) for work in busy}) == 1
    found = Counter({op.scope: op.times for op in operations.step(twice) if op.product and op.phase == "forward"})
    assert found["layers/attention/query"] == 2 * 19
    assert {times for scope, times in found.items() if "layers" not in scope} == {8}


@pytest.mark.parametrize("rounds", [1, 2])
def test_matrices_are_gathered_in_each_tick_or_once(rounds):
    """Three times a tick, one layer after another; or those of a stage once, which are then there in the peak."""
    work = on_stages(rounds=rounds, layers=16)
    once = work.with_execution(pipeline_gather="step")

    def gathers(work):
        return [each for each in traffic.collectives(work) if (each.kind, each.of) == ("all-gather", "layers")]

    passes = work.ticks.passes
    (stage,) = gathers(once)
    assert stage.times == 1 and sum(each.times * each.bytes for each in gathers(work)) == pytest.approx(
        3 * passes / rounds * stage.bytes
    )
    others = [[each for each in traffic.collectives(w) if each not in gathers(w)] for w in (work, once)]
    assert others[0] == others[1]
    assert memory(once).parameters > memory(work).parameters


def test_experts_are_cut_out_of_their_stacks_however_often_others_are_gathered():
    """Layers that are written out cut them out of stacks; `expert` gathers none of them."""
    mixture = {**model_fixtures.MIXTURE["feed_forward"], "d_ff": 256}
    model, layout = model_fixtures.model(feed_forward=mixture, num_layers=4), Layout(pipeline=2, expert=2)
    work = workload("train", model, 16, 32, layout=layout, microbatches=8, remat="none", scan_layers=False)
    once = work.with_execution(pipeline_gather="step")
    assert memory(once).parameters > memory(work).parameters


def test_memory_does_not_grow_with_the_number_of_microbatches():
    once, twice = on_stages(microbatches=8), on_stages(microbatches=16, batch=32)
    assert memory(twice) == memory(once)


def test_a_plan_says_its_bubble():
    experiment = config.load(
        MODELS / "llama3.1-8b.toml",
        ["training.batch=64", "training.microbatches=16", "training.sequence=4096", "training.steps=1"],
    )
    found = plan(Workload.of(experiment, Layout(pipeline=4, fsdp=4)), Target.parse("h100-sxm5:16"))
    row = found.row()
    sizes = {"count": 4, "rounds": 1, "slots": 8, "idle_slots": 0, "gather": "tick", "passes": 19, "kept_inputs": 7}
    assert row["stages"] == {**sizes, "bubble": 3 / 19}
    parts = row["time_s"]["parts"]
    share = parts["pipeline bubble"] / sum(parts.values())
    # The loss and the optimizer have no bubble.
    assert 0.75 * 3 / 19 < share < 3 / 19


@pytest.mark.parametrize("layout", [Layout(fsdp=8), Layout(pipeline=4, fsdp=2)], ids=str)
def test_what_is_sent_is_waited_for_or_hidden_in_idle_ticks_too(layout):
    """Without overlap all is waited for, and what overlap hides is not waited for."""
    work, target = replace(on_stages(batch=64), layout=layout), Target.parse("h100-sxm5:8")
    alone = plan(work, target, JAXLM.model_copy(update={"overlap": "none"}))
    waited, sent = (each.row()["sent"] for each in (alone, plan(work, target)))
    assert (
        waited["exposed_bytes"] == waited["bytes"] == sent["bytes"] > sent["exposed_bytes"] and not waited["hidden_s"]
    )
    assert sent["exposed_s"] + sent["hidden_s"] == pytest.approx(waited["exposed_s"])
    in_parts = sum(part.seconds for name, part in alone.time.parts.items() if name.startswith("exposed "))
    assert in_parts == pytest.approx(waited["exposed_s"]) if work.stages == 1 else in_parts < waited["exposed_s"]


def test_a_plan_says_what_its_stages_wait_for(capsys):
    """Two of eight stages have 15 of 126 layers, the others 16."""
    arguments = ["llama3.1-405b", "--on", "h100-sxm5:64", "--mesh", "pipeline=8,fsdp=8", "training.microbatches=16"]
    assert main(["plan", *arguments, "training.batch=128"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "stages 8, 2 of 128 slots without a layer; idle in 30.4% of their time (bubble)" in said
    assert main(["plan", *arguments, "training.batch=128", "--json"]) == 0
    sent = json.loads(capsys.readouterr().out)["sent"]
    assert 0 < sent["exposed_bytes"] < sent["bytes"]
    waits = f"{units.size(sent['exposed_bytes'])} waited for ({units.seconds(sent['exposed_s'])})"
    assert f"sent {units.size(sent['bytes'])} on each device: {waits}" in said


def test_a_plan_that_does_not_fit_says_what_would_help(capsys):
    mesh = ["--on", "h100-sxm5:64", "--mesh", "pipeline=8,fsdp=8", "training.microbatches=4", "training.batch=128"]
    assert main(["plan", "llama3.1-70b", *mesh]) == 0
    assert re.search(r"^try +execution.remat=full \([\d.]+ GiB\)", capsys.readouterr().out, re.M)
