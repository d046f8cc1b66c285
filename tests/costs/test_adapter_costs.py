"""Costs of a step with adapters: counted from its recording, as its program has them."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from jax.sharding import AbstractDevice
from markers import ELSEWHERE
from matrices import sampled
from workload_fixtures import workload

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.costs.counted import memory, operations, traffic
from jaxlm.costs.counted.flops import flops
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.plan import parameter_counts
from jaxlm.costs.workload import Workload
from jaxlm.lowering import collectives, hlo, report
from jaxlm.lowering.programs import step_programs
from jaxlm.lowering.targets import devices as devices_of
from jaxlm.models.lora_config import LoraConfig
from jaxlm.parallel.layout import Layout
from jaxlm.training.step import TrainStep

CHIPS = {"gpu": AbstractDevice("NVIDIA H200", 1, "gpu"), "tpu": AbstractDevice("TPU v5 lite", 1, "tpu")}
MODELS = {**model_fixtures.FAMILIES, "mixed": model_fixtures.MIXED, "mixture": model_fixtures.MIXTURE}
# Under one layer the embeddings do not train: attention has the gradients alone that lead to an adapter.
ONE_LAYER = {"query": ("*/attention/query",), "key": ("*/attention/key",), "value": ("*/attention/value",)}
TARGETS = {"all": ("*",), "some": ("*/attention/value", "*/down"), "gate": ("*/up",)}
# Of attention by XLA, the products of some gradients run; in the first layer, those of adapters alone.
OF_ATTENTION = {**{name: (f"*/attention/{name}",) for name in ("query", "key", "value", "output")}, "all": ("*",)}
OF_ATTENTION["two"] = "*/attention/query*", "*/attention/value"
REMAT = {"none": "none", "full": "full", "some": ("query", "up")}
LOOP = {"loop": True, "written": False}


@pytest.mark.parametrize(
    "name, targets, remat, platform, layers",
    sampled(
        [
            pytest.param(name, targets, remat, platform, layers)
            for name in MODELS
            for targets in TARGETS
            for remat in REMAT
            for platform in CHIPS
            for layers in LOOP
            if name != "mixture" or targets == "all"  # its experts have no adapters
        ],
        [
            *("llama-all-full-gpu-loop", "gpt2-some-none-tpu-loop", "gemma-all-some-gpu-written"),
            *("latent-all-none-gpu-written", "mixed-gate-full-tpu-written", "mixture-all-none-tpu-written"),
        ],
    ),
)
def test_every_product_is_counted(name, targets, remat, platform, layers):
    """To the last FLOP, and the optimizer's state to the last byte. In a first layer that is written out no gradient is
    computed of what it reads, since nothing before it trains."""
    _check_counts(MODELS[name], TARGETS[targets], REMAT[remat], platform, scan_layers=LOOP[layers])


@pytest.mark.parametrize(
    "targets, remat, layers",
    sampled(
        [pytest.param(targets, remat, layers) for targets in OF_ATTENTION for remat in REMAT for layers in LOOP],
        ["two-none-written", "value-full-written", "query-some-loop"],
    ),
)
def test_every_product_of_xla_is_counted(targets, remat, layers):
    _check_counts(MODELS["qwen3"], OF_ATTENTION[targets], REMAT[remat], "gpu", scan_layers=LOOP[layers], kernels="xla")


@pytest.mark.parametrize("platform", CHIPS)
@pytest.mark.parametrize("targets", ONE_LAYER)
def test_attention_has_the_gradients_that_are_asked_for(targets, platform):
    _check_counts({**MODELS["llama"], "num_layers": 1}, ONE_LAYER[targets], "none", platform)


def _check_counts(settings, targets, remat, platform, **execution):
    wide = {"nope_dim": 8} if settings["attention"].get("kind") == "latent" else {"head_dim": 16}
    model = model_fixtures.model(settings, attention={**settings["attention"], **wide})
    lora = LoraConfig(rank=4, targets=targets)
    changes = {"remat": remat, "kernels": "auto", "microbatches": 2, **execution}
    steps = TrainStep(
        model, *model_fixtures.sections(dtype="bfloat16", **changes), model_fixtures.optimization(), lora=lora
    )
    batch = dict.fromkeys(
        ("tokens", "targets", "segments", "positions"), jax.ShapeDtypeStruct((8, model_fixtures.CONTEXT), jnp.int32)
    )
    mesh = meshes.abstract(device=CHIPS[platform])
    with jax.sharding.use_abstract_mesh(mesh):
        state = jax.eval_shape(steps.init)
        found = count(steps.train, state, batch)
    work = workload("train", model, 8, model_fixtures.CONTEXT, platform=platform, lora=lora, **changes)
    ops = operations.step(work)
    assert sum(op.times * op.flops for op in ops if not op.kernel) == found.matmul_flops
    assert sum(op.times * (op.flops + op.elementwise) for op in ops if op.kernel) == found.kernel_flops
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim)
    assert memory.trained(work).optimizer == held
    counts = parameter_counts(work)
    assert counts["trainable"] == sum(leaf.size for leaf in jax.tree.leaves(state.parameters))
    assert counts["total"] - counts["trainable"] == sum(leaf.size for leaf in jax.tree.leaves(state.base))


@ELSEWHERE
@pytest.mark.parametrize(
    "name, targets, remat, chips, layers",
    sampled(
        [
            pytest.param(name, targets, remat, chips, layers)
            for name in ("llama", "latent", "mixture")
            for targets in ("all", "some")
            for remat in ("none", "full")
            for chips in ("h200-sxm", "tpu-v5e")
            for layers in LOOP
        ],
        ["llama-some-none-tpu-v5e-written"],
    ),
)
def test_the_compiled_program_computes_what_is_counted(name, targets, remat, chips, layers):
    target = Target.parse(f"{chips}:1")
    lora = LoraConfig(rank=4, targets=TARGETS[targets][: 1 if name == "mixture" else None])
    changes = {"dtype": "bfloat16", "remat": remat, "scan_layers": LOOP[layers], "kernels": "xla"}
    experiment = model_fixtures.experiment(model_fixtures.model(MODELS[name]), lora=lora, **changes)
    found = report.compile(experiment, "train", target, meshes.make(devices=devices_of(target))).report
    assert found.flops == found.counted_flops


@pytest.mark.parametrize("layers", LOOP)
def test_frozen_embeddings_and_norms_ask_for_no_gradient(layers):
    """The first layer's queries, keys and values read what nothing trained makes. Only written-out layers know it."""
    model, frozen = model_fixtures.model(MODELS["llama"]), ["embedding", "*norm*"]
    counts = [
        workload("train", model, 8, model_fixtures.CONTEXT, frozen=paths, scan_layers=LOOP[layers], kernels="xla")
        for paths in ([], frozen)
    ]
    whole, some = (sum(op.times * op.flops for op in operations.step(work)) for work in counts)
    of_projections = 2 * 8 * model_fixtures.CONTEXT * model.d_model * (32 + 16 + 16)
    assert whole - some == (of_projections if layers == "written" else 0)


def test_a_base_is_held_once_and_has_no_gradients():
    """Llama 3.1 8B is 16 GB in bfloat16; whole training holds 48 GB of parameters alone."""
    experiment = config.load("llama3.1-8b", ["lora.rank=16", "training.sequence=4096", "execution.remat=full"])
    work = Workload.of(experiment)
    whole = replace(work, lora=None)
    assert parameter_counts(work) == {
        "total": 8_030_261_248 + 41_943_040,
        "active": 8_030_261_248 + 41_943_040,
        "embedding": 2 * 128_256 * 4096,
        "trainable": 41_943_040,
    }
    held = memory.trained(work)
    assert held.parameters == 2 * 8_030_261_248 + (4 + 2) * 41_943_040
    assert held.optimizer == 8 * 41_943_040 and held.gradients == 2 * 41_943_040
    assert memory.trained(whole).parameters == 6 * 8_030_261_248
    # A third of a trained step's products are gradients of matrices.
    assert 0.66 < flops(work).model / flops(whole).model < 0.72
    assert flops(work).napkin < 0.68 * flops(whole).napkin


def test_targets_are_refused_before_anything_is_counted():
    experiment = config.load("qwen3-0.6b", ["lora.targets=['q_proj']"])
    with pytest.raises(InputError, match=r"lora.targets\[0\] = 'q_proj': it matches no parameter"):
        Workload.of(experiment)
    assert Workload.of(experiment, kind="decode").lora is None


def test_a_mesh_shards_adapters_with_what_they_adapt():
    model = model_fixtures.model()
    experiment = model_fixtures.experiment(model, lora=LoraConfig(rank=4))
    one, eight = (Workload.of(experiment, layout) for layout in (Layout(), Layout(data=2, fsdp=2, tensor=2)))
    assert memory.trained(eight).parameters < 0.4 * memory.trained(one).parameters


@pytest.mark.exhaustive
@pytest.mark.slow
@ELSEWHERE
def test_what_crosses_tensor_is_counted():
    """Within 5 % of a program for GPUs, which makes an all-reduce of some reduce-scatters. In the backward pass the
    gradients of one stream by several adapted matrices are one sum."""
    mesh = meshes.make(1, 2, 2, devices=devices_of(Target.parse("h200-sxm:4")))
    model, lora, rows = model_fixtures.model(vocab_size=2048), LoraConfig(rank=4), 32
    experiment = model_fixtures.experiment(model, lora=lora, dtype="bfloat16", batch=rows, kernels="xla")
    program = hlo.parse(step_programs(experiment, "train", mesh).step.trace().lower().compile().as_text())
    compiled, counted = Counter(), Counter()
    for sent in collectives.collectives(program, dict(mesh.shape)):
        compiled[sent.axes, sent.kind == "all-gather"] += sent.count * sent.bytes
    for sent in traffic.collectives(Workload.of(experiment, Layout(fsdp=2, tensor=2)).without_kernels()):
        counted[sent.axes, sent.kind == "all-gather"] += sent.times * sent.bytes
    for gathers in (False, True):
        across = ("tensor",), gathers
        assert counted[across] == pytest.approx(compiled[across], rel=0.05)
