"""The bytes of arguments that compiled programs read and copy: each weight once in a decoding step of the engine."""

import itertools
import math
import platform
import sys

import jax.numpy as jnp
import meshes
import model_fixtures
import pytest
from matrices import sampled
from workload_fixtures import workload

from jaxlm.costs.counted import operations
from jaxlm.costs.hardware.target import Target
from jaxlm.inference.cache_memory import CacheSize
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.settings import EngineSettings, Speculation
from jaxlm.inference.step_shapes import TILE, StepShape
from jaxlm.lowering import hlo, launched_kernels, targets
from jaxlm.lowering.argument_reads import argument_reads
from jaxlm.lowering.programs import step_programs
from jaxlm.models import tree
from jaxlm.models.quantize_config import Quantization
from kernels_pallas.paged_attention.costs import loop_name

MATRIX = 4 * 8 * 8
STATE = "(s32[], f32[8,8], f32[8])"
COMPUTATIONS = f"""
%turned (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8] parameter(0)
  ROOT %b = f32[8,8] bitcast(%a)
}}
%multiplied (a: f32[8,8], b: f32[8]) -> f32[8] {{
  %a = f32[8,8] parameter(0)
  %b = f32[8] parameter(1)
  %view = f32[8,8] fusion(%a), kind=kLoop, calls=%turned
  ROOT %c = f32[8] dot(%view, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
%converted (a: f32[8,8]) -> bf16[8,8] {{
  %a = f32[8,8] parameter(0)
  ROOT %b = bf16[8,8] convert(%a)
}}
%row (a: f32[8,8], i: s32[]) -> f32[1,8] {{
  %a = f32[8,8] parameter(0)
  %i = s32[] parameter(1)
  ROOT %b = f32[1,8] dynamic-slice(%a, %i, %i), dynamic_slice_sizes={{1,8}}
}}
%changed (a: f32[8,8], b: f32[1,8], i: s32[]) -> f32[8,8] {{
  %a = f32[8,8] parameter(0)
  %b = f32[1,8] parameter(1)
  %i = s32[] parameter(2)
  ROOT %c = f32[8,8] dynamic-update-slice(%a, %b, %i, %i)
}}
%body (p: {STATE}) -> {STATE} {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[8,8] get-tuple-element(%p), index=1
  %x = f32[8] get-tuple-element(%p), index=2
  %y = f32[8] fusion(%w, %x), kind=kOutput, calls=%multiplied
  ROOT %next = {STATE} tuple(%i, %w, %y)
}}
%test (p: {STATE}) -> pred[] {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %c = pred[] compare(%i, %i), direction=LT
}}
"""
# What is done to the matrix %w, and what is found of it: times read, times copied.
USES = {
    "a product": ("%r = f32[8] fusion(%w, %x), kind=kOutput, calls=%multiplied", 1, 0),
    "a conversion": ("%r = bf16[8,8] fusion(%w), kind=kLoop, calls=%converted", 1, 0.5),
    "a copy": ("%r = f32[8,8] copy(%w)", 1, 1),
    "a row": ("%r = f32[1,8] fusion(%w, %i), kind=kLoop, calls=%row", 1 / 8, 1 / 8),
    "two uses": (
        "%q = f32[8] dot(%w, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  %r = f32[8] fusion(%w, %x), kind=kOutput, calls=%multiplied",
        2,
        0,
    ),
    "an update in place, and a product of it": (
        "%o = f32[1,8] constant({...})\n"
        "  %u = f32[8,8] fusion(%w, %o, %i), kind=kLoop, calls=%changed\n"
        "  %r = f32[8] fusion(%u, %x), kind=kOutput, calls=%multiplied",
        1,
        0,
    ),
    "a copy to faster memory, where it is read for nothing": (
        "%s = (f32[8,8]{1,0:S(1)}, f32[8,8], u32[]) copy-start(%w)\n"
        "  %d = f32[8,8]{1,0:S(1)} copy-done(%s)\n"
        "  %r = f32[8] fusion(%d, %x), kind=kOutput, calls=%multiplied",
        1,
        0,
    ),
    "a copy by the run before": (
        "%r = (f32[8,8]{1,0:S(1)}, f32[8,8], u32[]) copy-start(%w), cross_program_prefetch_index=0",
        1,
        0,
    ),
    "a copy for the next run, besides the first": (
        "%f = (f32[8,8]{1,0:S(1)}, f32[8,8], u32[]) copy-start(%w), cross_program_prefetch_index=0\n"
        "  %r = (f32[8,8]{1,0:S(1)}, f32[8,8], u32[]) copy-start(%w)",
        1,
        0,
    ),
    "a product in a loop": (
        f"%p = {STATE} tuple(%i, %w, %x)\n  %r = {STATE} while(%p), condition=%test, body=%body",
        3,
        0,
    ),
}


@pytest.mark.parametrize("use", USES)
def test_uses_are_found(use):
    lines, read, copied = USES[use]
    found = hlo.parse(
        f"""HloModule m
{COMPUTATIONS}
ENTRY %main (w: f32[8,8], x: f32[8], i: s32[]) -> f32[8] {{
  %w = f32[8,8] parameter(0), metadata={{op_name="weight"}}
  %x = f32[8] parameter(1)
  %i = s32[] parameter(2)
  {lines}
  ROOT %done = f32[8] copy(%x)
}}
""",
        trips=3,
    )
    weight, *_ = argument_reads(found)
    assert weight == ("weight", MATRIX, read * MATRIX, copied * MATRIX)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.parametrize(
    ("chips", "kernels"),
    sampled(
        itertools.starmap(
            pytest.param,
            [("h200-sxm:1", "auto"), ("h200-sxm:1", "xla"), ("tpu-v6e:1x1", "auto"), ("h200-sxm:2", "auto")],
        ),
        ["h200-sxm:1-auto", "h200-sxm:1-xla", "tpu-v6e:1x1-auto"],
    ),
)
def test_a_step_reads_each_weight_once_and_the_pages_that_it_must(chips, kernels):
    """And copies no weight and no page. Every sequence has read two pages of three; a kernel gets all pages, and
    without one XLA for a GPU gathers the pages of the table."""
    target = Target.parse(chips)
    mesh = meshes.make(1, 1, target.devices, devices=targets.devices(target))
    wide = {**model_fixtures.LLAMA["feed_forward"], "d_ff": 512}  # XLA for a GPU pads matrices of other widths
    model = model_fixtures.model(d_model=256, context_length=384, vocab_size=1024, feed_forward=wide)
    programs = EnginePrograms.of(model, mesh, jnp.dtype("bfloat16"), EngineSettings(slots=4), kernels)
    cache = CacheSize(384, tuple(13 for _ in programs.layout.groups))
    compiled = programs.step(StepShape(4, 0, TILE), cache).compile()
    program = hlo.parse(compiled.as_text(), trips=2)
    found = argument_reads(program)
    weights = [each for each in found if each.name.startswith("parameters") and each.bytes > 2 * 256]
    assert len(weights) >= 3 * 7
    for each in weights:
        rows = 4 * 2 * 256  # of the tokens that are looked up
        # A TPU takes the table and the pages of so small a model to faster memory whole.
        expected = {each.bytes, rows} if "'embedding'" in each.name else {each.bytes}
        assert each.read in expected and each.copied <= rows, each
    pages = [each for each in found if each.name.startswith("pages")]
    counted = {each.name: each.bytes * 2 * 4 // 13 for each in pages}  # of 13 pages
    assert sum(counted.values()) == 2 * 4 * sum(programs.page_bytes)
    by_gather = kernels == "xla" and target.chip.kind == "gpu"
    for each in pages:
        gathered = each.bytes * 3 * 4 // 13  # of the table's 3 pages of each sequence
        expected = {gathered} if by_gather else {counted[each.name], each.bytes}
        assert each.read in expected and each.copied == (gathered if by_gather else 0), each
    name, count = (loop_name(1, None), 11) if by_gather else ("paged_attention", 2)
    launches = [kernel for kernel in launched_kernels.kernels(program) if name in kernel.name]
    launched = sum(kernel.count for kernel in launches)
    loops = _instructions(program, "while")
    if target.chip.kind == "tpu":
        assert launched == model.num_layers and not loops
        sizes = {each.bytes for each in pages}
        assert not [each for each in _instructions(program, "copy") if each.arrays[0].bytes in sizes]
        return
    # By gathers JAX 0.12 launches 8 a layer, and 0.10 11.
    assert 0.65 * count * model.num_layers < launched <= count * model.num_layers and not loops
    # Of sequences that fill their tables the kernels read all pages but one, which belongs to none.
    declared = workload("decode", model, 4, 384, layout=meshes.layout(1, 1, target.devices), page=128, kernels=kernels)
    said = sum(op.times * op.least_bytes for op in operations.step(declared) if op.scope.endswith(("scores", "pv")))
    moved = sum(kernel.count * kernel.bytes for kernel in launches)
    if by_gather:  # pages are read, written and read; scores and sums besides
        assert said == 3 * 4 * sum(programs.page_bytes) and 3 * said < moved < 1.15 * 3 * said
    else:
        assert moved - sum(programs.page_bytes) == pytest.approx(said, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.parametrize(
    ("chips", "kind"),
    sampled(
        itertools.starmap(
            pytest.param, itertools.product(["h200-sxm:1", "tpu-v6e:1x1"], ["int8", "int4", "fp8", "w8a8"])
        ),
        ["h200-sxm:1-int4", "tpu-v6e:1x1-int8"],
    ),
)
def test_a_step_reads_quantised_weights_once_as_they_are_kept(chips, kind):
    """And writes them nowhere in a wider dtype."""
    target, form = Target.parse(chips), Quantization(kind, 64 * (kind == "int4"))
    mesh = meshes.make(devices=targets.devices(target))
    wide = {**model_fixtures.LLAMA["feed_forward"], "d_ff": 512}
    model = model_fixtures.model(d_model=256, context_length=384, vocab_size=1024, num_layers=1, feed_forward=wide)
    programs = EnginePrograms.of(model, mesh, jnp.dtype("bfloat16"), EngineSettings(slots=4), quantized=form)
    cache = CacheSize(384, tuple(13 for _ in programs.layout.groups))
    found = argument_reads(hlo.parse(programs.step(StepShape(4, 0, TILE), cache).compile().as_text(), trips=1))
    values = [each for each in found if each.name.endswith("['values']")]
    assert len(values) == 7 + form.of_unembedding
    declared = tree.paths(tree.dimensions(tree.abstract(model)[1]))
    numbers = sum(math.prod(d.shape) for d in declared.values() if d.projection)
    numbers += model.vocab_size * model.d_model * form.of_unembedding
    assert sum(each.bytes for each in values) == numbers / (2 if kind == "int4" else 1)
    for each in values:
        assert each.read == each.bytes and each.copied == 0, each


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.parametrize(
    ("chips", "dtype"),
    sampled(
        itertools.starmap(pytest.param, itertools.product(["h200-sxm:1", "tpu-v6e:1x1"], ["int8", "fp8"])),
        ["h200-sxm:1-int8", "tpu-v6e:1x1-fp8"],
    ),
)
def test_a_step_reads_pages_of_eight_bits_once_as_they_are_kept(chips, dtype):
    """And their scales, and copies none."""
    wide = {**model_fixtures.LLAMA["feed_forward"], "d_ff": 512}
    model = model_fixtures.model(d_model=256, context_length=384, vocab_size=1024, num_layers=1, feed_forward=wide)
    check_pages(chips, model, dtype, ["key", "key_scales", "value", "value_scales"])


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.parametrize(
    ("chips", "dtype"),
    sampled(
        itertools.starmap(pytest.param, itertools.product(["h200-sxm:1", "tpu-v6e:1x1"], [None, "int8"])),
        ["h200-sxm:1-None", "tpu-v6e:1x1-int8"],
    ),
)
def test_a_step_reads_latents_once(chips, dtype):
    attention = {**model_fixtures.LATENT["attention"], "latent_rank": 256, "rope_dim": 64}
    changes = {"d_model": 256, "context_length": 384, "vocab_size": 1024, "num_layers": 1, "attention": attention}
    model = model_fixtures.model(model_fixtures.LATENT, **changes)
    check_pages(chips, model, dtype, ["key"] if dtype is None else ["key", "key_scales"])


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
def test_a_kernel_reads_the_pages_of_a_run_of_drafts_once():
    """Four sequences have three drafts each."""
    mesh = meshes.make(devices=targets.devices(Target.parse("h200-sxm:1")))
    model = model_fixtures.model(d_model=256, context_length=384, vocab_size=1024, num_layers=1)

    def moved(drafts):
        settings = EngineSettings(slots=4, speculation=Speculation("ngram", drafts) if drafts else None)
        programs = EnginePrograms.of(model, mesh, jnp.dtype("bfloat16"), settings)
        cache = CacheSize(384, tuple(13 for _ in programs.layout.groups))
        program = programs.step(StepShape(4 * (1 + drafts), 0, TILE), cache).compile()
        launches = launched_kernels.kernels(hlo.parse(program.as_text(), trips=1))
        return sum(kernel.count * kernel.bytes for kernel in launches if "paged_attention" in kernel.name)

    assert 1 < moved(3) / moved(0) < 1.3  # with a run of padding, and queries; rows by themselves would take four times


def check_pages(chips, model, dtype, names):
    """Check that a step whose sequences have read two pages of three reads these slots of their pages once."""
    target = Target.parse(chips)
    mesh = meshes.make(devices=targets.devices(target))
    settings = EngineSettings(slots=4, cache_dtype=dtype)
    programs = EnginePrograms.of(model, mesh, jnp.dtype("bfloat16"), settings)
    cache = CacheSize(384, tuple(13 for _ in programs.layout.groups))
    found = argument_reads(hlo.parse(programs.step(StepShape(4, 0, TILE), cache).compile().as_text(), trips=1))
    pages = [each for each in found if each.name.startswith("pages")]
    assert sum(each.bytes for each in pages) == 13 * sum(programs.page_bytes)
    assert sorted(each.name.rpartition("[")[2] for each in pages) == [f"'{name}']" for name in names]
    for each in pages:
        assert each.read in (each.bytes * 2 * 4 // 13, each.bytes) and each.copied == 0, each


def _instructions(program, opcode):
    every = (each for part in program.computations.values() for each in part.instructions.values())
    return [each for each in every if each.opcode == opcode]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
def test_an_update_reads_each_array_of_the_state_once():
    """Layers are written out: the gradients of all are joined once, not in a fusion for each array of the state. The
    master copies are read by the update alone, which writes the working copy too."""
    target = Target.parse("h200-sxm:1")
    mesh = meshes.make(devices=targets.devices(target))
    wide = {**model_fixtures.LLAMA["feed_forward"], "d_ff": 512}
    model = model_fixtures.model(d_model=256, num_layers=2, vocab_size=1024, feed_forward=wide)
    experiment = model_fixtures.experiment(model, batch=4, dtype="bfloat16", scan_layers=False)
    compiled = step_programs(experiment, "train", mesh).step.compile()
    reads = argument_reads(hlo.parse(compiled.as_text()))
    kept = [each for each in reads if ".parameters[" in each.name or ".optimizer" in each.name]
    matrices = [each for each in kept if each.bytes > 4 * 2 * 256]
    assert len(matrices) >= 3 * 8
    assert {each.name: each.read / each.bytes for each in matrices if each.read != each.bytes} == {}
