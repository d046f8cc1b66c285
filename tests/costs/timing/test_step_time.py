"""The expected time of a step: the sum of its parts, slower under slower software, within a narrow bracket."""

import dataclasses

import meshes
import pytest
from workload_fixtures import changed, workload

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.costs import local_shapes
from jaxlm.costs.counted import operations
from jaxlm.costs.counted.collective import Collective
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.hardware.rates import sustained
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.search import search
from jaxlm.costs.stack import JAXLM, Pipeline, Stack, stack_of
from jaxlm.costs.timing.communication import communication, sustained_time
from jaxlm.costs.timing.computation import by_kernel
from jaxlm.costs.timing.step_time import step_time

TARGET = Target.parse("h100-sxm5:8")
MODEL = config.load("llama3.1-8b").model
WORK = workload("train", MODEL, 64, 4096, remat="full", layout=meshes.layout(1, 8, 1), microbatches=4).on(TARGET.chip)


def expected(work=WORK, target=TARGET, **stack):
    return step_time(work, target, Stack(**stack)).expected


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
@pytest.mark.parametrize("chips", ["h100-sxm5:8", "tpu-v5e:8", "mi300x:8"])
def test_the_expected_time_is_the_sum_of_its_parts_and_of_their_reasons(kind, chips):
    target = Target.parse(chips)
    layout = meshes.layout(1, 8, 1) if kind == "train" else meshes.layout(1, 1, 8)
    work = changed(WORK, kind=kind, layout=layout, microbatches=4 if kind == "train" else 1)
    time = plan(work, target).time
    assert time.lower_bound <= time.low < time.expected < time.upper_bound
    assert time.expected == pytest.approx(sum(part.seconds for part in time.parts.values()))
    assert time.expected == pytest.approx(time.ideal + sum(reason.seconds for reason in time.reasons))
    shares = [reason.share for reason in time.reasons]
    assert shares == sorted(shares, reverse=True) and sum(shares) < 1
    assert time.upper_bound / time.low < 1.6 or kind != "train" or chips != "h100-sxm5:8"


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"overlap": "none"}, {}),
        ({"overlap": "none", "gradient_dtype": "float32"}, {"overlap": "none"}),
        ({"attention": "unfused"}, {"attention": "flash-2"}),
        ({"attention": "flash-1"}, {"attention": "flash-2"}),
        ({"attention": "flash-2"}, {"attention": "cudnn"}),
        ({"attention": "flash-2", "passes": "eager"}, {"attention": "flash-2"}),
        ({"watts": 500}, {}),
        ({}, {"precision": "float8"}),
    ],
)
def test_slower_software_takes_longer(slower, faster):
    assert expected(**slower) > expected(**faster)


@pytest.mark.parametrize("chip", ["a100-sxm4-80g", "h100-sxm5"])
def test_attention_takes_seven_products_at_its_kernels_rate_however_many_jaxlms_kernel_computes(chip):
    """On an A100 jaxlm's backward pass is two kernels of seven products, on an H100 one of five."""
    target = Target.parse(f"{chip}:1")
    work = changed(WORK, batch=1, sequence=4096, remat="none", layout=meshes.layout(1, 1, 1), microbatches=1)
    part = step_time(work.on(target.chip), target, Stack(attention="flash-2")).parts["attention"]
    heads, (rate, _) = (
        MODEL.layers[0].attention,
        sustained(target.chip).attention("flash-2", "training", True, 128, 4096),
    )
    flops = MODEL.num_layers * 7 * 2 * heads.num_heads * 128 * 4096 * 4097 / 2
    assert part.seconds == pytest.approx(flops / rate, rel=0.01)


@pytest.mark.parametrize("chip", ["h100-sxm5", "tpu-v5e"])
def test_a_kernel_of_attention_reads_its_cache_while_it_computes(chip):
    """Its first product has the traffic of both; none adds to it where reading takes longer."""
    target = Target.parse(f"{chip}:1")
    work = workload("decode", config.load("llama3.2-1b").model, 16, 8192).on(target.chip)
    kernels = [op for op in operations.step(work) if op.kernel and op.kernel.name]
    read = [op for op in kernels if op.least_bytes]
    assert len(read) < len(kernels)
    rate, _ = sustained(target.chip).moving("cache", read[0].least_bytes)
    part = step_time(work, target).parts["attention"]
    assert part.seconds == pytest.approx(sum(op.times * op.least_bytes for op in read) / rate, rel=1e-6)
    assert [op for op, _ in by_kernel(kernels)] == read


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("chip", ["gb300-nvl72", "rtx3090", "tpu-v5e"])
def test_no_part_is_faster_than_at_published_rates(chip, precision, dtype):
    """Attention of a short sequence waits for memory, and in float32 is slower; products in int8 are slower on some
    chips than in the step's dtype, which are then computed in that."""
    target = Target.parse(chip)
    work = workload("train", config.load("gpt2-124m").model, 2, 100, layout=meshes.layout(1, 1, 1), dtype=dtype)
    time = step_time(work.on(target.chip), target, Stack(precision=precision))
    assert all(part.seconds >= part.ideal for part in time.parts.values())
    assert time.lower_bound <= time.expected == pytest.approx(sum(part.seconds for part in time.parts.values()))


def test_a_framework_that_starts_each_operation_waits_for_the_host_where_operations_are_short():
    small = workload("train", config.load("gpt2-124m").model, 1, 128).on(TARGET.chip)
    one = Target.parse("h100-sxm5")
    assert expected(small, one, launch="eager") > 2 * expected(small, one)
    assert expected(launch="eager") == pytest.approx(expected())  # these are long enough


def test_the_bubble_of_a_pipeline_is_that_of_its_closed_form():
    target = Target.parse("h100-sxm5:32")
    sizes = {"stages": 4, "chunks": 2}
    time = step_time(WORK, target, Stack(pipeline=Pipeline(**sizes)))
    computed = time.expected - sum(time.parts[name].seconds for name in ("pipeline bubble", "optimizer"))
    computed -= time.parts["exposed sends between stages"].seconds
    # (p − 1) / (v m) of the time that a stage computes.
    assert time.parts["pipeline bubble"].seconds == pytest.approx(3 / (2 * 4) * computed)
    assert step_time(WORK, target, Stack(pipeline=Pipeline(stages=4, schedule="zbv"))).expected < time.expected
    # Eight layers a stage: between a quarter of all layers and that with the tables.
    whole = step_time(WORK, TARGET).expected
    assert whole / 4 < computed < whole / 3
    with pytest.raises(InputError, match="a pipeline of 64 stages needs as many layers"):
        step_time(WORK, Target.parse("h100-sxm5:512"), Stack(pipeline=Pipeline(stages=64)))


def test_a_plan_of_a_pipeline_has_a_mesh_for_each_stage():
    stack = Stack(pipeline=Pipeline(stages=4))
    whole, stages = plan(WORK, TARGET), plan(WORK, Target.parse("h100-sxm5:32"), stack)
    assert stages.memory.optimizer < 0.4 * whole.memory.optimizer  # each stage counts the tables
    heavier = plan(WORK, TARGET, Stack(state_bytes=18))
    state = sum(local_shapes.stored(WORK, d.axes, d.shape) for d in WORK.trainable.values())
    assert heavier.memory.total - whole.memory.total == 2 * state  # 16 bytes are jaxlm's own
    with pytest.raises(InputError, match="has 8 devices for each of 4 stages"):
        plan(WORK, TARGET, stack)
    own = dataclasses.replace(WORK, layout=meshes.layout(1, 4, 1).replace(pipeline=2))
    with pytest.raises(InputError, match="leave one of them out"):
        plan(own, Target.parse("h100-sxm5:32"), stack)


def test_the_layers_of_a_stage_are_written_out_if_that_stage_fits():
    stack, target = Stack(pipeline=Pipeline(stages=16)), Target.parse("h100-sxm5:128")
    model = config.load("llama3.1-70b").model
    work = changed(dataclasses.replace(WORK, model=model), remat="none", microbatches=8)
    assert plan(work, TARGET).layers.in_loop
    assert not plan(work, target, stack).layers.in_loop
    results = search(work, target, ("remat", "microbatches"), stack=stack)
    assert results and not any(each.layers.in_loop for each in results)


@pytest.mark.parametrize("stages", [4, 5])
def test_the_lower_bounds_of_a_pipeline_are_the_means_of_its_stages(stages):
    """The slowest stage is no faster than the mean, also where stages do not divide the layers."""
    whole = step_time(WORK, TARGET)
    time = step_time(WORK, Target.parse(f"h100-sxm5:{8 * stages}"), Stack(pipeline=Pipeline(stages=stages)))
    for name in ("compute", "memory", "collectives"):
        assert getattr(time, name) == pytest.approx(getattr(whole, name) / stages)
    assert time.lower_bound == pytest.approx(whole.lower_bound / stages) and time.lower_bound < time.low


def test_collectives_are_as_uncertain_as_their_own_measurements():
    network, rates = Network(TARGET, WORK.layout), sustained(TARGET.chip)
    part = sustained_time(network, rates, JAXLM, "all-gather", 2**28, ("fsdp",))
    assert part.spread == pytest.approx(rates.collective("all-gather", 8, 2**28).spread * part.seconds)
    nodes = Network(Target.parse("h100-sxm5:2x8"), {"data": 2, "fsdp": 8})
    part = sustained_time(nodes, rates, JAXLM, "all-reduce", 2**28, ("data",))
    assert part.spread == pytest.approx(rates.link("network").spread * part.seconds)


def test_what_waits_is_exposed_and_the_rest_is_hidden_as_far_as_computation_lasts():
    network, rates = Network(TARGET, WORK.layout), sustained(TARGET.chip)

    def sent(behind, waits=0, room=1.0, stack=JAXLM):
        each = Collective("all-gather", ("fsdp",), 10, 2**28, "layers", behind, waits)
        found = communication([each], network, rates, stack, {"forward": room})
        return sum(part.seconds for part in found.exposed.values()), found.hidden

    all_s, none = sent(None)
    assert none == 0 and sent("forward") == (0, pytest.approx(all_s))
    assert sent("forward", waits=1) == (pytest.approx(all_s / 10), pytest.approx(0.9 * all_s))
    assert sent("forward", room=all_s / 4) == (pytest.approx(0.75 * all_s), pytest.approx(all_s / 4))
    assert sent("forward", stack=Stack(overlap="none")) == (pytest.approx(all_s), 0)


def test_the_sum_of_gradients_hides_only_behind_layers_that_are_written_out():
    """In a loop, and after several microbatches, the gradients are there when all is computed."""
    target = Target.parse("h100-sxm5:2x8")
    work = changed(WORK, layout=meshes.layout(2, 8, 1), microbatches=1)

    def exposed(work, scan_layers):
        time = step_time(work.with_execution(scan_layers=scan_layers).on(target.chip), target)
        part = time.parts.get("exposed all-reduce over data")
        return part.seconds if part else 0.0

    assert exposed(work, False) == 0 < exposed(work, True)
    assert exposed(dataclasses.replace(work, microbatches=2), False) > exposed(work, True)  # in float32


def test_a_small_message_takes_the_latency_of_its_links_and_no_multiple_of_it():
    """Over two nodes far less than a millisecond, and no less than a message of half the size."""
    target = Target.parse("h100-sxm5:16")
    network, rates = Network(target, {"tensor": 16}), sustained(target.chip)

    def seconds(size):
        return sustained_time(network, rates, JAXLM, "all-reduce", size, ("tensor",)).seconds

    assert seconds(2**13) <= seconds(2**14) < 1e-3 < seconds(2**30)
    assert seconds(2**30) > network.seconds("all-reduce", 2**30, "tensor")


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("narrow", [{"precision": "float8"}, {"precision": "int4"}, {"cache": "float8"}], ids=str)
def test_narrow_weights_and_caches_take_less_time_and_memory(kind, narrow):
    work = changed(WORK, kind=kind, layout=meshes.layout(1, 1, 8), microbatches=1)
    before, after = plan(work, TARGET), plan(work, TARGET, Stack(**narrow))
    assert after.time.lower_bound <= before.time.lower_bound and after.time.expected <= before.time.expected
    assert after.time.lower_bound <= after.time.low <= after.time.expected
    if kind == "decode":
        assert after.time.expected < before.time.expected
    name = "kv_cache" if "cache" in narrow else "parameters"
    sizes = before.memory._asdict(), after.memory._asdict()
    assert {key for key in sizes[0] if sizes[0][key] != sizes[1][key]} == {name}
    tables = 2 * 2 * MODEL.vocab_size * MODEL.d_model // 8 if name == "parameters" else 0
    share = {"float8": 1 / 2, "int4": 1 / 4}[next(iter(narrow.values()))]
    assert sizes[1][name] - tables == pytest.approx(share * (sizes[0][name] - tables), rel=1e-3)


def test_reading_a_prompt_takes_attention_at_the_rate_of_its_head_dim():
    """An engine's step has rows that decode beside the prompt's: one row, whose kernel is the first."""
    one = Target.parse("a100-sxm4-80g")
    parts = plan(workload("prefill", MODEL, 1, 4096), one).time.parts
    assert parts["attention"].seconds < 0.2 * parts["products"].seconds


@pytest.mark.parametrize("chip", ["a100-sxm4-80g", "h100-sxm5"])
def test_a_short_cache_in_one_array_is_read_sooner_than_pages(chip):
    """Kernels that read pages take tens of microseconds for a short cache; for a long one both read at one rate."""
    target = Target.parse(chip)

    def reading(batch, **stack):
        return plan(workload("decode", MODEL, batch, 1024), target, Stack(**stack)).time.parts["attention"].seconds

    assert reading(1, pages=False) < 0.5 * reading(1)
    assert reading(128, pages=False) == pytest.approx(reading(128), rel=0.15)


def test_slices_of_a_tpu_are_joined_by_the_network_between_them():
    one, four = (Target.parse(f"tpu-v5e:{slices}16x16") for slices in ("", "4*"))
    assert str(four) == "tpu-v5e:4*16x16" and four.devices == 4 * one.devices
    work = workload("train", MODEL, 256, 2048, remat="full", layout=meshes.layout(1, 256, 1))
    several = changed(work, batch=1024, layout=meshes.layout(4, 256, 1))
    times = [plan(each, target).time for each, target in ((work, one), (several, four))]
    assert times[1].expected > times[0].expected
    assert times[1].parts["exposed all-reduce over data"].seconds > 0
    with pytest.raises(InputError, match="names no chips"):
        Target.parse("tpu-v5e:0*16x16")


def test_a_stack_is_named_or_given_by_its_keys():
    assert stack_of() == JAXLM and JAXLM.changes() == {}
    stack = stack_of("torch-fsdp", {"attention": "flash-3", "pipeline": {"stages": 4}})
    assert stack.overlap == "none" and stack.changes()["pipeline.stages"] == 4
    for name, changes, line in (
        ("torch-fspd", {}, "there is no stack 'torch-fspd'; did you mean torch-fsdp?"),
        (None, {"atention": "cudnn"}, "'atention' is no key of a stack; did you mean attention?"),
        (None, {"overlap": "some"}, "overlap of a stack: input should be 'dependence' or 'none'"),
        (None, {"attention": "falsh-2"}, "there is no attention kernel 'falsh-2'; did you mean flash-2?"),
        (None, {"pipeline": {"chunks": 2}}, "chunks of a pipeline need stages"),
    ):
        with pytest.raises(InputError, match=line):
            stack_of(name, changes)


MIXTURE = config.load("mixtral-8x7b").model


def sized(**keys):
    """Return Mixtral with other sizes of its experts."""
    return MIXTURE.model_copy(update={"feed_forward": MIXTURE.feed_forward.model_copy(update=keys)})


@pytest.mark.parametrize("chips", ["h100-sxm5:8", "tpu-v5p:2x2x2"])
def test_experts_are_products_that_take_longer_in_smaller_groups(chips):
    """As many experts are chosen: of more, each has fewer rows; attention takes the same time."""
    target = Target.parse(chips)
    work = changed(WORK, layout=meshes.layout(1, 8, 1), kernels="auto", batch=8, microbatches=1)
    few, many, wide = (
        step_time(changed(work, model=model).on(target.chip), target).parts
        for model in (sized(), sized(num_experts=256), sized(d_ff=2 * MIXTURE.feed_forward.d_ff))
    )
    assert few["attention"].seconds == many["attention"].seconds == wide["attention"].seconds
    assert few["products"].seconds < many["products"].seconds
    assert 1.5 * few["products"].seconds < wide["products"].seconds < 2.1 * few["products"].seconds
    assert few["products"].seconds > few["attention"].seconds / 4


@pytest.mark.parametrize("experts", [1, 8])
def test_narrow_weights_are_read_sooner_also_those_of_experts(experts):
    """One expert is a product too, and no attention."""
    target = Target.parse("h100-sxm5:8")
    model = sized(num_experts=experts, experts_per_token=1)
    work = changed(
        WORK, model=model, kind="decode", batch=8, sequence=64, layout=meshes.layout(1, 1, 8), kernels="auto"
    )
    work = changed(work, microbatches=1, remat="none").on(target.chip)
    wide, narrow = (step_time(work, target, Stack(**stack)).parts for stack in ({}, {"precision": "int8"}))
    assert narrow["attention"].seconds == wide["attention"].seconds
    assert narrow["products"].ideal < 0.55 * wide["products"].ideal  # bytes at the published bandwidth


def test_fewer_choices_than_devices_are_rows_of_those_that_have_one():
    """Three tokens choose six of eight experts, one on each device, as with experts cut over all."""
    target, times = Target.parse("tpu-v5p:2x2x2"), []
    for layout in (meshes.layout(1, 1, 1).replace(expert=8), meshes.layout(1, 1, 8)):
        work = changed(WORK, model=sized(), kind="decode", batch=3, sequence=64, layout=layout, kernels="auto")
        times.append(step_time(changed(work, microbatches=1, remat="none").on(target.chip), target).lower_bound)
    assert times[0] == pytest.approx(times[1], rel=0.02)
