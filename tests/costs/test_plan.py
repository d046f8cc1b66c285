"""Closed forms against counts from programs, against the state of real optimizers, and against each other."""

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import expert_tiles
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from matrices import sampled
from workload_fixtures import changed, sections_of, workload

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.costs import local_shapes
from jaxlm.costs.counted import operations, traffic
from jaxlm.costs.counted.cache import kv_bytes_per_token
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.counted.memory import memory, trained
from jaxlm.costs.counted.parameters import parameters
from jaxlm.costs.hardware.catalog import of_kind
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.pictures import points
from jaxlm.costs.plan import plan
from jaxlm.costs.plan_order import TIE
from jaxlm.costs.search import layouts, search, variants
from jaxlm.costs.serving import critical_batch, speculative_speedup
from jaxlm.costs.stack import Stack
from jaxlm.costs.stack_memory import least_memory, stack_memory
from jaxlm.costs.workload import Workload
from jaxlm.lowering.fit import fit
from jaxlm.parallel.layout import Layout
from jaxlm.training.step import TrainStep

CONFIGS = Path(__file__).parents[2] / "configs"
SOME = '["query", "key", "value", "attention", "up"]'  # of the activations, kept for the backward pass
EXPERIMENTS = sorted([*CONFIGS.glob("*.toml"), *CONFIGS.glob("models/*.toml")], key=lambda path: path.stem)


def counted(experiment, trips=None):
    """The products of the experiment's own training step."""
    steps = TrainStep.of(experiment)
    shape = experiment.training.batch, experiment.training.sequence
    batch = {n: jax.ShapeDtypeStruct(shape, jnp.int32) for n in ("tokens", "targets", "segments", "positions")}
    return count(steps.train, jax.eval_shape(steps.init), batch, trips=trips)


def executed_in_tiles(work):
    """The FLOPs that run, where the products of experts take the most tiles of rows that there may be, and how often
    the loops over these run."""
    mixtures = {f for layer in work.model.layers if (f := layer.feed_forward).kind == "mixture"}
    if not mixtures:
        return flops(work).executed, {}
    (mixture,) = mixtures
    rows = work.batch * work.sequence * mixture.experts_per_token // work.microbatches
    trips = expert_tiles.most_trips(rows, mixture.num_experts)
    return expert_tiles.executed(operations.step(work), work.model, {rows}), trips


def windowless(work):
    """Each token attends to all tokens before it: XLA computes the scores outside a window too, and masks them."""
    attention = work.model.attention.model_copy(update={"window": None})
    return changed(work, model=work.model.model_copy(update={"attention": attention, "pattern": ()}))


@pytest.mark.parametrize(
    "path, remat",
    sampled(
        [
            pytest.param(path, remat, id=f"{path.stem}-{remat}")
            for path in EXPERIMENTS
            for remat in ("none", "full", SOME)
        ],
        [
            "gpt2-124m-none",
            "llama3.1-8b-full",
            f"qwen3-0.6b-{SOME}",
            "experts-none",
            "mistral-7b-none",
            "gemma2-2b-full",
        ],
    ),
)
def test_every_config_s_training_step_has_the_products_that_are_counted(path, remat):
    experiment = config.load(path, [f"execution.remat={remat}", "execution.kernels=xla"])
    executed, trips = executed_in_tiles(Workload.of(experiment))
    cost = counted(experiment, trips)
    assert executed == cost.matmul_flops
    # Rounded figures per number, of norms, activations, softmax, loss and optimizer.
    elementwise = sum(op.times * op.elementwise for op in operations.step(Workload.of(experiment)))
    ran = cost.flops - cost.matmul_flops
    if trips:  # whose loops add up the gradients of experts tile by tile, as kernels do not
        assert elementwise <= 1.2 * ran
    else:
        assert elementwise == pytest.approx(ran, rel=0.2)
    if remat == "none":
        if not trips:
            assert flops(windowless(Workload.of(experiment))).model == executed
        assert cost.forward.matmul_flops * 3 == executed


@pytest.mark.parametrize(
    "name, chip, remat",
    sampled(
        [
            pytest.param(name, chip, remat, id=f"{name}-{remat}")
            for name, chip in (
                ("qwen3-0.6b", "NVIDIA H200"),
                ("gpt2-124m", "TPU v5 lite"),
                ("gemma3-1b", "NVIDIA H200"),
            )
            for remat in ("none", "full", SOME)
        ],
        ["qwen3-0.6b-none", "gpt2-124m-full"],
    ),
)
def test_kernels_compute_what_both_counters_read(name, chip, remat):
    """Norms of heads, rotary positions and gates are Qwen's; biases, and an activation that is no kernel, GPT-2's;
    norms after blocks Gemma's."""
    settings = [
        "execution.kernels=auto",
        "training.sequence=512",
        "training.microbatches=2",
        f"execution.remat={remat}",
    ]
    experiment = config.load(CONFIGS / f"models/{name}.toml", settings)
    device = AbstractDevice(chip, 1, {"N": "gpu", "T": "tpu"}[chip[0]])
    mesh = meshes.abstract(device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        cost = counted(experiment)
    ops = operations.step(Workload.of(experiment).on(of_kind(chip)))
    assert cost.matmul_flops == sum(op.times * op.flops for op in ops if not op.kernel)
    assert cost.kernel_flops == sum(op.times * (op.flops + op.elementwise) for op in ops if op.kernel)
    launched = cost.of(kind="kernel")
    moved = sum(op.times * op.most_bytes for op in ops if op.kernel)
    assert launched.bytes_in + launched.bytes_out == pytest.approx(moved, rel=1e-3)  # angles once, not per sequence


@pytest.mark.parametrize(
    "sequence, remat",
    sampled(
        [
            pytest.param(sequence, tuple(json.loads(remat)) if remat == SOME else remat, id=f"{sequence}-{remat}")
            for sequence in (128, 300, 1024)
            for remat in ("none", "full", SOME)
        ],
        ["128-none", f"1024-{SOME}"],
    ),
)
def test_a_cpu_computes_attention_in_parts(sequence, remat):
    """Both counters find the same products, and nearly the same other FLOPs; MFU counts attention whole."""
    model, sections = (
        model_fixtures.model(context_length=sequence),
        model_fixtures.sections(batch=4, sequence=sequence, remat=remat),
    )
    steps = TrainStep(model, *sections, model_fixtures.optimization())
    batch = {n: jax.ShapeDtypeStruct((4, sequence), jnp.int32) for n in ("tokens", "targets", "segments", "positions")}
    with jax.set_mesh(meshes.make(devices=jax.devices()[:1])):
        cost = count(steps.train, jax.eval_shape(steps.init), batch)
    whole = workload("train", model, 4, sequence, "float32", remat=remat, kernels="xla")
    work = whole.on_cpu()
    assert flops(work).executed == cost.matmul_flops
    assert (flops(work).executed < flops(whole).executed) == (memory(work) != memory(whole)) == (sequence > 256)
    assert flops(work)._replace(executed=0) == flops(whole)._replace(executed=0)
    elementwise = sum(op.times * op.elementwise for op in operations.step(work))
    assert elementwise == pytest.approx(cost.flops - cost.matmul_flops, rel=0.2)


def test_no_other_chip_computes_attention_in_parts():
    work = workload("train", model_fixtures.model(context_length=1024), 4, 1024, kernels="xla")
    assert not any(work.on(Target.parse(name).chip).platform == "cpu" for name in ("h200-sxm", "tpu-v5e", "mi300x"))
    cpu = Target.parse("h200-sxm").chip.model_copy(update={"kind": "cpu", "compute_capability": None})
    assert (
        work.on(cpu) == work.on_cpu()
        and work.on_cpu().on(cpu) == work.on_cpu()
        and work.on_cpu().without_kernels() == work
    )
    for kind in ("prefill", "decode"):  # of a cache
        cached = changed(work, kind=kind)
        assert flops(cached.on_cpu()) == flops(cached.on(Target.parse("tpu-v5e").chip))


@pytest.mark.parametrize(
    "family, kind",
    sampled(
        [pytest.param(family, kind) for family in model_fixtures.FAMILIES for kind in model_fixtures.OPTIMIZERS],
        ["llama-adamw", "gpt2-adafactor", "qwen3-muon", "llama3.1-lion", "gemma-sgd"],
    ),
)
def test_products_and_state_of_every_optimizer(family, kind):
    model = model_fixtures.model(model_fixtures.FAMILIES[family])
    work = workload("train", model, 8, 32, optimizer=kind, remat="full", microbatches=2, kernels="xla")
    steps = TrainStep(model, *sections_of(work), work.optimizer)
    state = jax.eval_shape(steps.init)
    shape = work.batch, work.sequence
    batch = {n: jax.ShapeDtypeStruct(shape, jnp.int32) for n in ("tokens", "targets", "segments", "positions")}
    assert flops(work).executed == count(steps.train, state, batch).matmul_flops
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim)
    assert memory(work).optimizer == held


FROZEN = {
    "layers": ("layers/*",),
    "embedding": ("embedding",),
    "attention": ("layers/attention/*", "embedding"),
    "down": ("layers/feed_forward/down",),
    "all but the unembedding": ("layers/*", "embedding"),
    "all but one table": ("layers/*", "embedding", "final_norm/*"),
}


@pytest.mark.parametrize(
    "family, kind, patterns, remat",
    sampled(
        [
            pytest.param(*of, patterns, remat, id=f"{of[0]}-{patterns}-{remat if isinstance(remat, str) else 'some'}")
            for of in (("llama", "adamw"), ("qwen3", "muon"), ("gemma", "adamw"))
            for patterns in FROZEN
            for remat in ("none", "full", ("query", "key", "value", "attention", "up"))
        ],
        [
            "llama-layers-full",
            "qwen3-down-none",
            "gemma-all but the unembedding-some",
        ],
    ),
)
def test_products_of_a_step_in_which_something_is_frozen(family, kind, patterns, remat):
    """Layers with nothing that trains in or before them have no backward pass, and run only once."""
    model = model_fixtures.model(model_fixtures.FAMILIES[family])
    groups = [{"pattern": pattern, "learning_rate_scale": 0.0} for pattern in FROZEN[patterns]]
    optimization = model_fixtures.optimization(kind=kind, groups=groups)
    experiment = model_fixtures.experiment(model, optimization, remat=remat, microbatches=2)
    work, whole = (
        Workload.of(experiment),
        workload("train", model, 8, 32, remat=remat, microbatches=2, kernels="xla"),
    )
    assert flops(work).executed == counted(experiment).matmul_flops <= flops(changed(whole, optimizer=kind)).executed
    assert memory(work).total <= memory(changed(work, frozen=frozenset())).total


def times_sent(work):
    """Return how often a step runs each kind of collective of each kind of array."""
    times = Counter()
    for c in traffic.collectives(work):
        times[c.kind, c.of] += c.times
    return times


def test_what_is_frozen_is_gathered_and_not_sent():
    """A linear probe gathers its layers once; where the embedding trains they are gathered for both passes."""
    model = model_fixtures.model()
    whole = workload("train", model, 16, 32, optimizer="muon", layout=meshes.layout(2, 2, 2), kernels="xla")
    paths = frozenset(parameters(model))
    layers = frozenset(path for path in paths if path.startswith("layers/"))
    found = times_sent(changed(whole, frozen=layers))
    assert not {("reduce-scatter", "layers"), ("all-to-all", "optimizer")} & found.keys()
    assert found["all-gather", "layers"] == 2 * model.num_layers and found["reduce-scatter", "embedding"] == 1
    (sums,) = (
        c for c in traffic.collectives(changed(whole, frozen=paths - {"final_norm/scale"})) if c.of == "gradients"
    )
    assert sums.bytes == 2 * model.d_model
    probe = times_sent(changed(whole, frozen=paths - {"unembedding"}))
    assert probe["all-gather", "layers"] == model.num_layers and ("reduce-scatter", "embedding") not in probe
    assert probe["reduce-scatter", "residual"] == probe["all-gather", "residual"] == 2 * model.num_layers + 1


def test_a_pattern_that_decides_nothing_is_refused_before_anything_is_counted():
    experiment = config.load(CONFIGS / "models/qwen3-0.6b.toml", ['optimizer.groups=[{pattern="layer/*"}]'])
    with pytest.raises(InputError, match="matches no parameter; there are"):
        Workload.of(experiment)
    assert not Workload.of(experiment, kind="decode").frozen


@pytest.mark.parametrize("mesh", [(1, 8, 1), (2, 2, 2), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("kind", model_fixtures.OPTIMIZERS)
def test_state_of_every_optimizer_lies_on_a_mesh_as_counted(kind, mesh):
    model = model_fixtures.model(model_fixtures.QWEN3)  # two key heads: whole beside four parts of `tensor`
    steps = TrainStep(model, *model_fixtures.sections(), model_fixtures.optimization(kind=kind))
    held = jax.eval_shape(steps.init).optimizer, steps.shardings(meshes.make(*mesh)).optimizer
    shards = jax.tree.map(lambda x, lies: math.prod(lies.shard_shape(x.shape)) * 4 if x.ndim else 0, *held)
    work = workload("train", model, 8, 32, optimizer=kind, layout=meshes.layout(*mesh), kernels="xla")
    assert trained(work).optimizer == sum(jax.tree.leaves(shards))


@pytest.mark.parametrize("remat", sampled(["none", "full"], ["full"]))
def test_dropout_takes_passes_and_no_products(remat):
    model = model_fixtures.model()
    dropped, plain = (model_fixtures.experiment(model, remat=remat, dropout=rate) for rate in (0.1, 0.0))
    work, without = (Workload.of(experiment) for experiment in (dropped, plain))
    assert flops(work) == flops(without)

    def elementwise(work):
        return sum(op.times * op.elementwise for op in operations.step(work))

    more = counted(dropped).flops - counted(plain).flops
    assert elementwise(work) - elementwise(without) == pytest.approx(more, rel=0.1)


@pytest.mark.parametrize(
    "every, sequence",
    sampled([pytest.param(every, sequence) for every in (None, 2, 3) for sequence in (3, 24)], ["None-3", "2-24"]),
)
def test_windows_leave_what_is_seen_through_them(every, sequence):
    """MFU counts the keys in each query's window; a causal count has only visible keys, with half of the diagonal. XLA
    computes all scores of the keys that are there, an engine those of whole pages, and the executed count has them."""
    layers, narrow = 7, {"attention": {"window": 5}}
    pattern = () if every is None else ({"name": "narrow", "layers": every - 1, **narrow}, {"name": "wide"})
    attention = {"num_heads": 8, "num_kv_heads": 4, "window": 5 if every is None else None}
    model = model_fixtures.model(num_layers=layers, attention=attention, pattern=pattern)
    through = [every is None or (layer + 1) % every > 0 for layer in range(layers)]
    assert [block.attention.window for block in model.layers] == [5 if narrow else None for narrow in through]
    for kind in ("train", "prefill", "decode"):
        work = workload(kind, model, 4, sequence, kernels="xla")
        whole, seen = flops(windowless(work)), flops(work)
        queries, size = 1 if kind == "decode" else sequence, min(5, sequence)
        a_key = 2 * 2 * 4 * 8 * 4 * (3 if kind == "train" else 1)  # both products of a score
        keys = sum(queries * (size if narrow else sequence) for narrow in through)
        assert whole.model - seen.model == a_key * (layers * queries * sequence - keys)
        assert whole.executed == seen.executed and (whole.executed == whole.model or kind != "train")
        if kind == "decode":
            assert seen.model_causal == seen.model
        else:
            pairs = [[min(t + 1, 5) if narrow else t + 1 for t in range(sequence)] for narrow in through]
            itself = [size / 2 if narrow else sequence / 2 for narrow in through]
            assert seen.model - seen.model_causal == a_key * (keys - sum(map(sum, pairs)) + sum(itself))


def test_a_kernel_for_attention_may_skip_what_nobody_sees():
    """Neither the lower bound nor the expected time computes scores that causality and windows hide."""
    sizes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
    plain = model_fixtures.model(context_length=2**17, attention=sizes)
    narrow = model_fixtures.model(context_length=2**17, attention={**sizes, "window": 1024})
    target = Target.parse("h200-sxm")
    of = {m: plan(workload("train", m, 1, 2**17, remat="full"), target) for m in (plain, narrow)}
    assert of[plain].flops.executed == of[narrow].flops.executed
    assert of[plain].time.expected > 20 * of[narrow].time.expected
    # Attention is nearly all of it.
    scores = of[plain].flops.executed / target.chip.peak("bfloat16")
    assert of[plain].time.compute == pytest.approx(scores / 2, rel=0.01)
    assert of[narrow].time.compute < scores / 50
    for each in of.values():
        assert sum(point.seconds for point in points(each.work, target.chip)) == pytest.approx(each.time.lower_bound)
        assert each.time.ideal <= each.time.lower_bound < each.time.expected
    without = plan(workload("train", plain, 1, 2**17, kernels="xla"), target)
    assert without.time.compute == pytest.approx(without.flops.executed / target.chip.peak("bfloat16"))


def test_figures_of_gpt2():
    """nanoGPT's transformer_sizing.ipynb, whose count of a sequence's forward pass is 291,648,307,200."""
    model = config.load(CONFIGS / "models" / "gpt2-124m.toml").model
    figures = flops(workload("train", model, 1, 1024, kernels="xla"))
    assert figures.model == 3 * 291_648_307_200
    attention = 3 * 2 * 2 * 12 * 1024 * 1024 * 768
    assert figures.model_causal == figures.model - attention // 2
    assert figures.napkin == figures.model - attention


def test_napkin_is_six_for_each_parameter_and_token():
    work = Workload.of(config.load(CONFIGS / "models" / "llama3.1-8b.toml", ["execution.kernels=xla"]))
    table = work.model.vocab_size * work.model.d_model
    gains = (2 * work.model.num_layers + 1) * work.model.d_model
    assert flops(work).napkin == 6 * (8_030_261_248 - table - gains) * work.tokens


def test_work_divides_over_devices():
    """One device's products and state times the devices are those of the whole, if everything divides."""
    whole = workload("train", model_fixtures.model(), 16, 32, remat="full", microbatches=2, kernels="xla")
    total = sum(op.times * op.flops for op in operations.step(whole))
    for mesh in (meshes.layout(2, 2, 2), meshes.layout(1, 4, 4), meshes.layout(8, 1, 1)):
        part = changed(whole, layout=mesh)
        assert mesh.size * sum(op.times * op.flops for op in operations.step(part)) == total
        assert (
            memory(part).optimizer * mesh["fsdp"] * mesh["tensor"] <= memory(whole).optimizer * 1.2
        )  # gains replicate


@pytest.mark.parametrize("kernels", ["xla", "auto"])
@pytest.mark.parametrize("heads, kv_heads, tensor", [(12, 2, 4), (12, 4, 3), (12, 4, 6), (8, 1, 8), (8, 8, 4)])
def test_attention_divides_by_query_heads_whatever_its_keys_do(heads, kv_heads, tensor, kernels):
    attention = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 64}
    model = model_fixtures.model(attention=attention, vocab_size=192, context_length=256)

    def computed(mesh):
        ops = operations.step(workload("train", model, 16, 256, remat="full", layout=mesh, kernels=kernels))
        return sum(op.times * op.flops for op in ops if op.visible)

    assert tensor * computed(Layout(tensor=tensor)) == computed(meshes.layout())


def test_parameters_on_a_device_are_those_that_the_sharding_gives():
    model = model_fixtures.model()
    mesh = meshes.abstract(2, 2, 2)
    from jaxlm.parallel.partition import partition

    work = workload("train", model, 16, 32, layout=meshes.layout(2, 2, 2), kernels="xla")
    for d in parameters(model).values():
        spec = partition(d.axes, d.shape, mesh)
        parts = math.prod(mesh.shape[axis] for entry in spec if entry for axis in np.atleast_1d(entry))
        assert local_shapes.stored(work, d.axes, d.shape) == math.prod(d.shape) // parts


def test_what_is_sent():
    work = workload(
        "train", model_fixtures.model(), 16, 32, microbatches=2, layout=meshes.layout(2, 2, 2), kernels="xla"
    )
    found = traffic.collectives(work)
    assert {(c.kind, c.axes) for c in found} == {
        ("all-gather", ("fsdp",)),
        ("reduce-scatter", ("fsdp",)),
        ("all-reduce", ("fsdp",)),
        ("all-reduce", ("data",)),
        ("all-gather", ("tensor",)),
        ("reduce-scatter", ("tensor",)),
        ("all-reduce", ("tensor",)),
    }
    (gradients,) = (c for c in found if c.axes == ("data",))
    assert gradients.times == 1
    # Those of tests/test_traffic.py: of each microbatch, in a layer two forward and two backward, and one each around.
    residuals = {kind: n for (kind, of), n in times_sent(work).items() if of == "residual"}
    assert set(residuals.values()) == {2 * (4 * work.model.num_layers + 2)}
    assert not traffic.collectives(changed(work, layout=meshes.layout()))


def test_decoding_keeps_weights_and_tables_where_they_are():
    work = workload("decode", model_fixtures.model(), batch=8, sequence=64, layout=meshes.layout(fsdp=8))
    for each in (work, replace(work, kind="prefill")):
        assert {c.of for c in traffic.collectives(each)} == {"draws"}


@pytest.mark.parametrize("norm_placement", ["before", "both"])
def test_the_last_sum_of_a_layer_runs_again_where_a_norm_reads_it(norm_placement):
    def sums(remat):
        model = model_fixtures.model(norm_placement=norm_placement)
        work = workload("train", model, 16, 32, remat=remat, layout=Layout(tensor=2), kernels="xla")
        return sum(c.times for c in traffic.collectives(work) if (c.kind, c.of) == ("reduce-scatter", "residual"))

    assert sums("full") - sums("none") == (2 if norm_placement == "both" else 1) * model_fixtures.model().num_layers


@pytest.mark.parametrize("tied, sums", [(False, 3), (True, 6)])
def test_tables_are_gathered_once_and_summed_for_each_use(tied, sums):
    """The looked-up table is gathered before the loop over three microbatches, the unembedding inside it; an engine
    has it whole."""
    model = model_fixtures.model(tied_embeddings=tied)
    work = workload("train", model, 24, 32, microbatches=3, layout=meshes.layout(2, 4, 1), kernels="xla")
    sent = times_sent(work)
    assert (sent["all-gather", "embedding"], sent["reduce-scatter", "embedding"]) == (1, sums)
    unembedding = [] if tied else [("all-gather", "unembedding"), ("reduce-scatter", "unembedding")]
    assert [key for key in sent if key[1] == "unembedding"] == unembedding and all(
        sent[key] == 3 for key in unembedding
    )
    assert sent["all-gather", "layers"] == 2 * 3 * model.num_layers == 2 * sent["reduce-scatter", "layers"]
    for kind in ("prefill", "decode"):
        assert not [c for c in traffic.collectives(changed(work, kind=kind)) if c.of == "embedding"]


def test_muon_moves_whole_matrices():
    """Three layers, padded to eight, in float32; a device has a quarter of each, and keys whole over `tensor`."""
    model = model_fixtures.model(attention={"num_heads": 8, "num_kv_heads": 1, "head_dim": 4})
    found = traffic.collectives(
        workload("train", model, 16, 32, optimizer="muon", layout=meshes.layout(2, 2, 2), kernels="xla")
    )
    keys, others = 2 * 32 * 4, 2 * 32 * 32 + 3 * 32 * 48
    assert {c[:4] for c in found if c.of == "optimizer"} == {
        ("all-to-all", ("tensor",), 2, 4 * 8 * others // 4),
        ("all-gather", ("tensor",), 1, 4 * 8 * keys // 2),
        ("all-to-all", ("fsdp",), 2, 4 * 8 * (others + keys) // 4),
        ("all-gather", ("data",), 1, 4 * 8 * (others + keys) // 4),
    }


def test_cache_of_llama():
    """2 × 126 layers × 8 heads × 128 × 2 bytes; and a page for rows of padding."""
    work = Workload.of(config.load(CONFIGS / "models" / "llama3.1-405b.toml", ["execution.kernels=xla"]), kind="decode")
    assert kv_bytes_per_token(work) == 516_096
    assert memory(work).kv_cache == 516_096 * (work.batch * work.sequence + work.page)


@pytest.mark.parametrize("target", ["h200-sxm:8", "tpu-v5e:4x4", "tpu-v5p:4x4x4", "a100-sxm4-80g:64"])
def test_a_plan_s_figures_agree_with_one_another(target):
    target = Target.parse(target)
    model = config.load(CONFIGS / "models" / "llama3.1-8b.toml").model
    work = workload(
        "train",
        model,
        2 * target.devices,
        4096,
        remat="full",
        layout=meshes.layout(1, target.devices, 1),
        kernels="xla",
    )
    row = plan(work, target).row()
    time = row["time_s"]
    assert max(time["compute"], time["memory"], time["collectives"]) <= time["lower_bound"] < time["expected"]
    assert time["expected"] < time["upper_bound"]
    assert row["tokens_per_s"] * time["expected"] == pytest.approx(work.tokens)
    assert row["mfu"] == pytest.approx(
        row["flops"]["model"] / (time["expected"] * target.chips * target.chip.peak("bfloat16"))
    )
    parts = row["memory_bytes_per_device"]
    assert parts["total"] == sum(parts[name] for name in memory(work)._fields)
    if row["usd_per_million_tokens"]:
        low, high = target.chip.usd_per_hour
        at = target.chips / 3600 / row["tokens_per_s"] * 1e6
        assert low * at * 0.999 <= row["usd_per_million_tokens"] <= high * at * 1.001


@pytest.mark.parametrize(
    ("kind", "each", "shards", "step_s"),
    [
        ("train", 16, 4, 6 * 7_504_658_432 * 16 * 4096 / (8 * 989.4e12)),
        ("prefill", 2, 2, (2 * 6_979_321_856 * 4096 + 2 * 525_336_576) * 16 / (8 * 989.4e12)),
        ("decode", 2, 2, 2 * 8_030_261_248 / 2 / 4.8e12),
    ],
)
def test_a_plan_has_the_napkin_beside_it(kind, each, shards, step_s):
    """6 or 2 FLOPs for each matrix's number and token, 16 or 2 bytes for each parameter, which data replicates, and
    in inference fsdp too."""
    model, target = config.load(CONFIGS / "models" / "llama3.1-8b.toml").model, Target.parse("h200-sxm:8")
    found = plan(workload(kind, model, 16, 4096, remat="full", layout=meshes.layout(2, 2, 2), kernels="xla"), target)
    row = found.row()["napkin"]
    assert row["memory_bytes"] == each * 8_030_261_248 // shards and row["flops"] == found.flops.napkin
    assert row["step_s"] == pytest.approx(step_s) and row["step_s"] < found.time.lower_bound
    assert row["tokens_per_s"] * row["step_s"] == pytest.approx(found.work.tokens)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("tensor", [8, 16])
def test_the_napkin_of_inference_divides_as_the_count_does(kind, tensor):
    """16 devices do not divide the 8 key/value heads, whose matrices stay whole."""
    model, target = config.load(CONFIGS / "models" / "llama3.1-8b.toml").model, Target.parse(f"h200-sxm:{tensor}")
    found = plan(workload(kind, model, 16, 4096, layout=meshes.layout(1, 1, tensor), kernels="xla"), target)
    assert found.napkin.memory_bytes == pytest.approx(found.memory.parameters, rel=1e-3)
    assert (found.napkin.memory_bytes > 2 * 8_030_261_248 // tensor * 1.1) == (tensor == 16)


def test_a_run_s_price_is_that_of_its_steps():
    target = Target.parse("h100-sxm5:8")
    work = workload("train", model_fixtures.model(), 16, 32, layout=meshes.layout(1, 8, 1), steps=1000, kernels="xla")
    row = plan(work, target).row()
    assert row["run_s"] == pytest.approx(1000 * row["time_s"]["expected"])
    assert row["usd_per_run"] == pytest.approx(row["usd_per_million_tokens"] * 1000 * work.tokens / 1e6)


def test_more_of_everything_is_never_faster():
    target = Target.parse("h100-sxm5:8")
    base = workload("train", model_fixtures.model(), 16, 32, layout=meshes.layout(1, 8, 1), kernels="xla")
    first = plan(base, target).time
    for change in ({"batch": 32}, {"remat": "full"}, {"model": model_fixtures.model(num_layers=6)}):
        other = plan(changed(base, **change), target).time
        assert other.lower_bound >= first.lower_bound and other.expected >= first.expected


def test_what_is_not_fused_counts_biases_rotation_and_norms_of_heads():
    def unfused(**attention):
        model = model_fixtures.model(attention={**model_fixtures.LLAMA["attention"], **attention})
        work = workload("prefill", model, 2, 32, kernels="xla")
        return sum(op.times * op.most_bytes for op in operations.step(work) if op.scope.startswith("layers/attention/"))

    model = model_fixtures.model()
    heads, kv_heads, H = model.attention.num_heads, model.attention.num_kv_heads, model.attention.head_dim
    rows = 2 + 2 * 32  # of two sequences that decode, and of two prompts
    moved = 2 * 2 * rows * model.num_layers * H  # read and written in bfloat16, for each head
    base = unfused()
    assert unfused(qkv_bias=True) - base == moved * (heads + 2 * kv_heads)
    assert unfused(qk_norm="head") - base == moved * (heads + kv_heads)


def test_search_finds_what_fits_and_sorts_it():
    target = Target.parse("h200-sxm:8")
    model = config.load(CONFIGS / "models" / "llama3.1-8b.toml").model
    work = workload("train", model, 16, 4096, kernels="xla")
    found = search(work, target)
    assert found and all(p.fits and p.work.layout.size == 8 for p in found)
    times = [p.time.expected for p in found]
    assert all(time <= later * (1 + TIE) for time, later in itertools.pairwise(times))
    assert {p.work.layout for p in found} & set(layouts(work, 8))


@pytest.mark.parametrize("stack", [Stack(), Stack(state_bytes=18), Stack(state_bytes=6)], ids=str)
def test_a_search_leaves_out_no_mesh_on_which_a_variant_fits(stack):
    model = config.load(CONFIGS / "models" / "llama3.1-8b.toml").model
    work = workload("train", model, 16, 4096)
    for layout in layouts(work, 8):
        on_mesh = replace(work, layout=layout)
        least = least_memory(on_mesh, stack).total
        assert 0 < least <= min(stack_memory(each, stack).total for each in variants(on_mesh))


PLANS = """
import itertools, sys, time, timeit
sys.path[:0] = [sys.argv[1]]
import meshes
from workload_fixtures import changed, workload
from jaxlm import config
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan

target, model = Target.parse("h100-sxm5:64"), config.load("llama3.1-405b").model
work = workload("train", model, 64, 8192, remat="full", layout=meshes.layout(1, 8, 8), kernels="xla")
plan(work, target)
rows = itertools.count(64, 64)
# Beside a loop, by the time of the process, the least of several: other load of the machine slows both, and by turns.
each = lambda: plan(changed(work, batch=next(rows)), target), lambda: sum(i * i for i in range(50_000))
taken = [[timeit.timeit(one, timer=time.process_time, number=20) for one in each] for _ in range(15)]
plans, loops = map(min, zip(*taken))
print(plans / loops)
"""


def test_a_mesh_that_does_not_divide_the_batch_is_refused():
    """1,024 sequences on 992 chips would be on each of them."""
    target = Target.parse("h100-sxm5:992")
    experiment = config.load("llama3.1-8b", ["training.batch=1024", "training.sequence=128"])
    work = Workload.of(experiment, Layout(fsdp=992))
    with pytest.raises(InputError, match="992 shards of the batch .* do not divide the 1,024 sequences in 1 microb"):
        plan(work, target)
    with pytest.raises(InputError, match="take a multiple of 2,976"):
        plan(replace(work, batch=1984, microbatches=3), target)
    assert plan(replace(work, batch=1984), target).work.rows() == 2


def test_ten_thousand_plans_a_minute():
    """On a core on which Python adds 15 million squares a second: a loaded one does less of both.

    In a process of its own, as a command plans: what other tests leave behind slows it.
    """
    command = [sys.executable, "-c", PLANS, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) * 20 * 50_000 / 15e6 < 20 * 60 / 10_000


def test_decoding_is_bound_by_memory_until_its_critical_batch():
    target = Target.parse("h100-sxm5")
    model = config.load(CONFIGS / "models" / "llama3.1-8b.toml").model
    work = workload("decode", model, 1, 128, kernels="xla")
    batch = critical_batch(work, target)
    assert plan(changed(work, batch=batch // 2), target).time.bound_by == "memory"
    assert plan(changed(work, batch=batch), target).time.bound_by == "compute"
    # 989 TFLOP/s over 3.35 TB/s are 295 FLOP per byte: 295 sequences for the weights, and the caches come on top.
    assert 256 < batch <= 1024
    assert critical_batch(changed(work, sequence=100_000), target) is None


@pytest.mark.parametrize(
    ("acceptance", "guesses", "ratio", "speedup"),
    [(0.8, 5, 0.0, 3.68928), (1.0, 4, 0.0, 5.0), (0.0, 3, 0.1, 1 / 1.3), (0.75, 1, 0.5, 1.75 / 1.5)],
)
def test_speculative_decoding(acceptance, guesses, ratio, speedup):
    assert speculative_speedup(acceptance, guesses, ratio) == pytest.approx(speedup, rel=1e-6)


def test_bad_input():
    work = workload("train", model_fixtures.model(), 16, 32, kernels="xla")
    with pytest.raises(InputError, match="has 1 devices and h100-sxm5:8 has 8"):
        plan(work, Target.parse("h100-sxm5:8"))
    with pytest.raises(InputError, match="a sequence of 64 is longer than model.context_length = 32"):
        plan(changed(work, sequence=64), Target.parse("h100-sxm5"))
    with pytest.raises(InputError, match="rtx4090 has no published scale_out_bytes_per_s"):
        plan(changed(work, layout=meshes.layout(2, 8, 1)), Target.parse("rtx4090:16"))
    with pytest.raises(InputError, match="has no published peak"):
        plan(work, Target.parse("cerebras-wse3"))


def test_kernels_are_left_out_of_chips_that_do_not_run_them():
    """Every function of a workload and a target leaves them out."""
    experiment = config.load(CONFIGS / "models/qwen3-0.6b.toml", ["training.sequence=1024", "training.batch=8"])
    auto, target = Workload.of(experiment, meshes.layout(1, 8, 1)), Target.parse("mi300x:8")
    plain = changed(auto, kernels="xla")
    assert auto.runs_kernels and not target.chip.runs_kernels and plan(auto, target) == plan(plain, target)
    assert search(auto, target)[0] == search(plain, target)[0]
    assert fit(auto, target, lambda work: 1, print)[0] == fit(plain, target, lambda work: 1, print)[0]
    decode = (changed(work, kind="decode") for work in (auto, plain))
    assert len({critical_batch(work, target) for work in decode}) == 1
    assert plan(auto, Target.parse("h200-sxm:8")).memory.total < plan(plain, Target.parse("h200-sxm:8")).memory.total
