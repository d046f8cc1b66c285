"""Steps compiled for absent chips: figures read from XLA's programs agree with XLA's own and with the count."""

import json
import platform
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import meshes
import pytest
from matrices import sampled

from jaxlm import config
from jaxlm.cli import main
from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError
from jaxlm.costs.counted import drawing, memory, traffic
from jaxlm.costs.hardware import catalog
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.workload import Workload
from jaxlm.lowering import buffers, held_memory, hlo, launched_kernels, programs, report, targets
from jaxlm.parallel.collectives import on_each_device
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.partition import named_sharding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
    ),
]

SMALL = """
[model]
vocab_size = 4096
context_length = 512
num_layers = 4
d_model = 512
norm = { kind = "rms" }
position = { kind = "rope" }
attention = { num_heads = 8, num_kv_heads = 4 }
feed_forward = { d_ff = 1536, activation = "silu", gated = true }
[execution]
remat = "full"
kernels = "xla"
[inference]
sequences = 16
[training]
batch = 16
microbatches = 2
"""
NARROW = (
    *("model.d_model=256", "model.attention.num_heads=4"),
    *("model.feed_forward.d_ff=512", "model.context_length=256"),
)
FROZEN = '{pattern = "%s", learning_rate_scale = 0.0}'
FOUR = {"tpu": "tpu-v5e:2x2", "cuda": "h200-sxm:4"}


@pytest.fixture
def small(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def compiled(path: Path, chips: str, kind: str, sizes=(1, 2, 2), overrides=(), quick=False) -> report.CompiledStep:
    target = Target.parse(chips)
    mesh = meshes.make(*sizes, devices=targets.devices(target))
    return report.compile(config.load(path, list(overrides)), kind, target, mesh, quick)


@pytest.mark.exhaustive  # the sample of it is in test_collectives_are_as_counted
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_flops_and_memory_agree_with_the_count_and_with_xla(small, platform, kind):
    # XLA's buffer assignment has a hole of one residual in prefill, and rounds up the many small arrays of a draw.
    holes = {"train": 0.01, "prefill": 0.065, "decode": 0.02}[kind]
    assert_flops_and_memory_agree(compiled(small, FOUR[platform], kind), platform, kind, holes)


def assert_flops_and_memory_agree(found, platform, kind, holes=0.01):
    assert found.report.flops == found.report.counted_flops
    memory = found.report.memory
    assert memory.peak == memory.arguments + memory.outputs + memory.temporaries <= memory.capacity
    # All arguments are live at the peak, and all temporaries but for holes that the allocator leaves between them.
    named = sum(held.bytes for held in found.report.held_buffers if not held.array)
    assert named == pytest.approx(memory.arguments, rel=1e-2)
    drawn = found.report.draw is not None and found.report.draw.memory.temporaries == memory.temporaries
    program = hlo.parse(found.texts["draw.optimised.hlo" if drawn else "optimised.hlo"])
    live = buffers.peak(program).bytes
    assert live == sum(held.bytes for held in found.report.held_buffers if held.array)
    # Outputs that no argument gives its memory are memory for temporaries until they are written; so is that of the
    # parameters' copy in bfloat16 between the last read of the old and the first write of the new.
    copies = sum(x.bytes for each in program.entry.parameters for x in each.arrays if x.dtype == "bf16")
    assert live <= 1.001 * memory.temporaries + (copies if kind == "train" else memory.outputs)
    if platform == "cuda":  # a TPU has most of so small a program in VMEM, and keeps scratch in memory
        assert live >= (1 - holes) * memory.temporaries and not memory.gaps
    if kind == "train":
        assert any("models/" in held.source for held in found.report.held_buffers)


@pytest.mark.exhaustive  # the sample of it is in test_loops.py
def test_flops_of_windowed_products_are_as_counted(small):
    """A TPU gathers and scatters matrices during their products, in loops that step by 2. Only training does: an engine
    keeps its weights whole along `fsdp`."""
    found = compiled(small, "tpu-v5e:2x4", "train", (1, 8, 1), ["training.microbatches=1", "model.num_layers=2"])
    assert found.texts["optimised.hlo"].count("body=%wide.windowed_dot_general") >= 7
    assert found.report.flops == found.report.counted_flops


@pytest.mark.exhaustive
@pytest.mark.parametrize("platform", FOUR)
def test_a_window_of_all_layers_is_compiled_as_counted(small, platform):
    """The cache holds the window's tokens alone, and a decoding step computes no other scores."""
    whole, narrow = [], ["model.attention.window=128"]  # whole tiles of a TPU
    found = [compiled(small, FOUR[platform], "decode", overrides=overrides).report for overrides in (whole, narrow)]
    assert all(each.flops == each.counted_flops for each in found)
    if platform == "tpu":  # on a GPU a kernel multiplies, whose products are not among those of XLA's program
        assert found[0].flops > found[1].flops
    of_cache = [
        memory.kv_cache(Workload.of(config.load(small, overrides), Layout(fsdp=2, tensor=2), "decode"))
        for overrides in (whole, narrow)
    ]
    saved = found[0].memory.arguments - found[1].memory.arguments
    assert saved == pytest.approx(of_cache[0] - of_cache[1], rel=1e-3)


def test_heads_that_tiles_do_not_divide_are_computed_by_cublas(small):
    """XLA's first tiles of Triton are 16 deep, and no GPU is here to try others. A layer's 24 channels are a slice."""
    heads = ("model.attention.num_heads=4", "model.attention.num_kv_heads=4")
    sizes = ("model.num_layers=2", "model.d_model=96", "model.vocab_size=512", "model.context_length=64", *heads)
    found = report.compile(
        config.load(small, [*sizes, "execution.scan_layers=false", "execution.remat=none", "training.microbatches=1"]),
        *("train", Target.parse("h200-sxm:1"), meshes.make(devices=targets.devices(Target.parse("h200-sxm:1")))),
    ).report
    assert found.flops == found.counted_flops
    assert any("cublas" in name for name, _ in found.calls)


@pytest.mark.parametrize("chip, temporaries, gaps", [("tpu-v5e", 600, 200), ("h200-sxm", 800, 0)])
def test_gaps_that_a_tpu_closes_are_not_what_a_step_needs(chip, temporaries, gaps):
    """A GPU's runtime allocates one block, gaps included."""

    class Compiled:
        def memory_analysis(self):
            return SimpleNamespace(
                argument_size_in_bytes=100,
                output_size_in_bytes=90,
                alias_size_in_bytes=80,
                temp_size_in_bytes=800,
                peak_memory_in_bytes=710,
            )

    memory = held_memory.memory_of(Compiled(), catalog.find(chip))
    assert (memory.arguments, memory.outputs, memory.temporaries, memory.gaps) == (100, 10, temporaries, gaps)
    assert memory.peak == 110 + temporaries


@pytest.mark.parametrize(
    "sizes, settings",
    sampled(
        [
            pytest.param((1, 4, 1), [], id="fsdp"),
            pytest.param((2, 2, 1), ["optimizer.kind=muon", "model.tied_embeddings=true"], id="muon, tied"),
            pytest.param((1, 2, 2), ["optimizer.kind=muon"], id="muon, tensor"),
            pytest.param(
                (1, 1, 4),
                ["model.attention.num_kv_heads=2", "execution.kernels=auto", "model.vocab_size=65536", *NARROW],
                id="kernels, half a head",
            ),
            pytest.param(
                (1, 1, 4),
                ["model.attention.num_heads=12", "model.attention.num_kv_heads=6", "model.d_model=768"],
                id="a head and a half",
            ),
            pytest.param((1, 1, 4), ["model.attention.qk_norm=projection"], id="norms of all heads"),
            pytest.param(
                (2, 2, 1),
                [f"optimizer.groups=[{FROZEN % 'layers/feed_forward/*'}, {FROZEN % 'embedding'}]"],
                id="frozen in each layer",
            ),
            pytest.param(
                (1, 2, 2), [f"optimizer.groups=[{FROZEN % 'layers/*'}, {FROZEN % 'embedding'}]"], id="frozen layers"
            ),
        ],
        ["kernels, half a head"],
    ),
)
def test_collectives_are_as_counted(small, sizes, settings):
    """Bytes agree exactly, except that XLA gathers a query matrix once more next to `tensor`, and older versions gather
    a table for each microbatch next to `data`. Muon's three layers are padded to one for each of four devices. Small
    arrays are sent together; no program takes less time than is counted. Replicated key/value heads send their
    gradients, with one head per device and with more."""
    step = compiled(small, FOUR["cuda"], "train", sizes, ["model.num_layers=3", *settings])
    of_all_heads = "model.attention.qk_norm=projection" in settings  # 1.8 % there, on JAX 0.10.2
    assert_flops_and_memory_agree(step, "cuda", "train", holes=0.02 if of_all_heads else 0.01)
    found, sent, counted = step.report, Counter(), Counter()
    for c in found.collectives:
        sent[c.kind, c.axes] += c.count * c.bytes
    for c in traffic.collectives(found.plan.work):
        counted[c.kind, c.axes] += c.times * c.bytes
    assert found.flops == found.counted_flops
    for (kind, axes), bytes in counted.items():
        if kind == "all-gather":
            assert bytes <= sent[kind, axes] <= 1.1 * bytes
        elif kind != "all-reduce":
            assert bytes == sent[kind, axes]
        elif axes == ("tensor",):  # and gradients of norms, from shards of the residual stream
            model, microbatches = found.plan.work.model, found.plan.work.microbatches
            assert bytes <= sent[kind, axes] <= bytes + 4 * microbatches * (2 * model.num_layers + 1) * model.d_model
    if found.kernel_flops:
        assert found.memory.peak == pytest.approx(found.plan.memory.total, rel=0.25)  # as of a small step below
    # Gradients leave the loops over microbatches and layers before they cross `data`.
    assert not [c for c in found.collectives if "data" in c.axes and c.in_loop]
    # Only gradients of replicated key/value heads go between some devices of an axis.
    copies = Counter({c.kind: c.times * c.bytes for c in traffic.collectives(found.plan.work) if c.of == "copies"})
    for c in found.collectives:
        copies[c.kind] -= 0 if c.spans_axes else c.count * c.bytes
    assert not any(copies.values())
    # Devices with the same key/value heads are part of an axis; the count takes the full axis.
    seconds = sum(found.seconds(c._replace(spans_axes=True)) or 0.0 for c in found.collectives)
    assert 0.7 * seconds <= found.plan.time.collectives <= seconds


@pytest.mark.parametrize("kind", sampled(["prefill", "decode"], ["decode"]))
@pytest.mark.parametrize("platform", sampled(["tpu", "cuda"], ["cuda"]))
def test_a_draw_exchanges_and_holds_what_is_counted(small, platform, kind):
    """On all chips the logits are gathered once; a TPU sends small results in several collectives."""
    step = compiled(small, FOUR[platform], kind, (2, 1, 2), ["model.vocab_size=32768", "model.num_layers=1"])
    found, rows = step.report, step.report.work.draws()
    counted = {(c.kind, c.axes): c.bytes for c in traffic.collectives(found.work) if c.of == "draws"}
    sent = {(c.kind, c.axes): c.count * c.bytes for c in found.draw.collectives}
    assert counted["all-gather", ("tensor",)] == 4 * rows * 32768 == sent["all-gather", ("tensor",)]
    assert {axes for _, axes in sent} == {axes for _, axes in counted} == {("tensor",), ("data",)}
    if platform == "cuda":
        assert sent == counted
    counted_bytes = drawing.workspace(found.work)  # XLA of JAX 0.12 holds one more array as large as the logits
    assert 0.9 * counted_bytes <= found.draw.memory.temporaries <= 1.2 * counted_bytes
    assert found.memory.temporaries >= found.draw.memory.temporaries
    assert {"draw.stablehlo.mlir", "draw.optimised.hlo"} <= step.texts.keys()
    row = found.row()
    assert row["draw"]["memory"] == found.draw.memory._asdict() and row["draw"]["draws"] == rows and not row["draft"]


def with_draft_model(path: Path) -> tuple[Experiment, Path]:
    """Return an experiment whose drafts a model of one narrow layer draws, and that model's file."""
    drafter = path.with_name("drafter.toml")
    drafter.write_text(SMALL.replace("d_model = 512", "d_model = 256").replace("num_layers = 4", "num_layers = 1"))
    options = [f"inference.speculate={drafter}:3", "inference.length=300", "model.num_layers=2"]
    return config.load(path, options, "decode"), drafter


def test_a_draft_model_has_programs_beside_the_step(small):
    """It reads the rows of the engine's step, of which each sequence has four, and proposes for each sequence, over as
    many pages of its own."""
    experiment, _ = with_draft_model(small)
    step, draw, read, propose = programs.step_programs(experiment, "decode", meshes.make())
    pages = [[x.shape[0] for x in jax.tree.leaves(each.operands[1])] for each in (step, read, propose)]
    assert {*pages[0]} == {*pages[1]} == {*pages[2]} == {1 + 16 * 3}
    assert read.operands[3].token_R.shape == step.operands[3].token_R.shape == (4 * 16,)
    assert propose.operands[4].slot_N.shape == (16,) and draw is not None
    wide, narrow = (each.operands[0]["embedding"] for each in (step, read))
    assert (wide.shape, narrow.shape) == ((4096, 512), (4096, 256))


def test_a_draft_model_of_a_shorter_context_is_refused(small):
    experiment, drafter = with_draft_model(small)
    drafter.write_text(drafter.read_text().replace("context_length = 512", "context_length = 256"))
    with pytest.raises(InputError, match="context of 256 tokens, and sequences have up to 300; give inference.context"):
        programs.step_programs(experiment, "decode", meshes.make())


@pytest.mark.exhaustive
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_memory_of_a_draft_model_is_counted_and_compiled(small, platform):
    experiment, _ = with_draft_model(small)
    target = Target.parse(FOUR[platform])
    step = report.compile(experiment, "decode", target, meshes.make(1, 2, 2, devices=targets.devices(target)))
    found, row = step.report, step.report.row()
    if platform == "cuda":  # a TPU pads the small arrays of so small a model
        assert found.memory.peak == pytest.approx(found.plan.memory.total, rel=0.05)
    named = {held.name: held.bytes for held in found.held_buffers if not held.array}
    assert sum(named.values()) == pytest.approx(found.memory.arguments, rel=1e-2)
    assert 0 < named["draft model's parameters"] < named["parameters"] and named["draft model's pages"] > 0
    most = max(each.memory.temporaries for each in (found.draw, found.draft.read, found.draft.propose))
    assert found.memory.temporaries >= most and row["draft"]["drafts"] == 3
    assert row["draft"]["propose"]["memory"] == found.draft.propose.memory._asdict()
    assert {"draft.read.optimised.hlo", "draft.propose.optimised.hlo"} <= step.texts.keys()


@pytest.mark.exhaustive  # test_random_configurations.py holds the same against the jaxpr
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_declared_kernel_flops_are_as_counted(small, platform):
    """Norms, rotary positions, attention, gates and a chunked loss: their FLOPs are not in XLA's text. A quick
    compilation has the same FLOPs."""
    more, level = ["execution.kernels=auto", "model.vocab_size=65536"], jax.config.jax_optimization_level
    found = compiled(small, FOUR[platform], "train", overrides=more, quick=platform == "tpu").report
    assert found.row()["quick"] == (platform == "tpu") and jax.config.jax_optimization_level == level
    assert found.flops == found.counted_flops
    assert found.kernel_flops == pytest.approx(found.counted_kernel_flops, rel=1e-9)  # shared out as floats
    launched = [kernel for kernel in found.kernels if kernel.kind in ("tpu_custom_call", "__gpu$xla.gpu.triton")]
    assert len(launched) > 20 and all(kernel.declared_flops for kernel in launched)
    assert found.memory.peak == pytest.approx(found.plan.memory.total, rel=0.25)  # in a small step, small arrays matter


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_pallas_kernels_are_found_and_nothing_is_gathered_around_them(platform):
    """A kernel on a sharded array runs on each device's shard."""
    from jax.experimental import pallas as pl

    def double(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2.0

    def kernel(x):
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="double")(x)

    mesh = meshes.make(1, 2, 2, devices=targets.devices(Target.parse(FOUR[platform])))
    axes = ("batch", "act_heads")
    given = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=named_sharding(axes, (256, 256), mesh))

    def step(x):
        return jax.lax.scan(lambda x, _: (on_each_device(kernel, (x, axes)), None), x, length=3)[0]

    with jax.set_mesh(mesh):
        text = jax.jit(step, out_shardings=given.sharding).lower(given).compile().as_text()
    program = hlo.parse(text)
    assert [count for name, count in launched_kernels.calls(program) if "double" in name] == [3]
    assert not report.collectives.collectives(program, dict(mesh.shape))


@pytest.fixture
def compiled_once(monkeypatch):
    """Compile a step once for all commands of a test that ask for the same."""
    plain, made = report.compile, {}

    def once(*arguments):
        if (asked := repr(arguments)) not in made:
            try:
                made[asked] = plain(*arguments)
            except report.DoesNotFit as refused:
                made[asked] = refused
        if isinstance(made[asked], report.DoesNotFit):
            raise made[asked]
        return made[asked]

    monkeypatch.setattr(report, "compile", once)


def run(capsys, *arguments) -> tuple[int, dict]:
    status = main(["compile", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.exhaustive
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_command_reports_and_keeps_the_programs(small, platform, capsys, tmp_path):
    status, row = run(capsys, small, "--on", FOUR[platform], "--mesh", "fsdp=2,tensor=2", "--dump", tmp_path / "kept")
    assert status == 0 and row["fits"] and row["devices"] == 4
    assert set(row["memory_bytes_per_device"]) == {"arguments", "outputs", "temporaries", "peak", "gaps", "capacity"}
    assert row["flops_per_device"] == row["counted"]["flops_per_device"] and row["compile_s"] > 0
    assert {tuple(c["axes"]) for c in row["collectives"]} >= {("fsdp",), ("tensor",)}
    assert all({"kind", "axes", "count", "bytes", "time_s"} <= set(c) for c in row["collectives"])
    products = [fusion for fusion in row["fusions"] if fusion["flops"] > 1e8]
    assert any(fusion["bytes"] and fusion["intensity"] > 1 for fusion in products)  # others stay in a TPU's VMEM
    assert "while" in (tmp_path / "kept/optimised.hlo").read_text()
    assert "stablehlo.while" in (tmp_path / "kept/stablehlo.mlir").read_text()
    assert json.loads((tmp_path / "kept/report.json").read_text()) == row


@pytest.mark.parametrize("chips", sampled(["tpu-v5e:1x1", "rtx4090"], ["tpu-v5e:1x1"]))
def test_a_step_that_does_not_fit_reports_sizes_and_suggestions(small, chips, capsys, tmp_path, compiled_once):
    """A TPU's compiler rejects the program; for a GPU the peak is compared with the capacity."""
    settings = ["training.batch=512", "training.microbatches=1", "execution.remat=none"]
    status, row = run(capsys, small, "--on", chips, *settings, "--dump", tmp_path / "kept")
    assert status == 1 and not row["fits"]
    assert json.loads((tmp_path / "kept/report.json").read_text()) == row
    assert "stablehlo.while" in (tmp_path / "kept/stablehlo.mlir").read_text()
    memory = row["memory_bytes_per_device"]
    assert memory["peak"] > memory["capacity"] and row["compile_s"] > 0
    assert {"flops_per_device", "collectives", "kernels", "outputs"} <= row.keys() | memory.keys()
    assert main(["compile", str(small), "--on", chips, *settings]) == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed and re.search(r"\btry (execution|training)\.\w+=", " ".join(printed.split()))


@pytest.mark.exhaustive
def test_the_largest_microbatch_that_fits_is_found(small, capsys):
    status, row = run(capsys, small, "--on", "rtx4090", "training.batch=256", "--fit")
    assert status == 0 and row["fits"]
    assert row["tried"][-1]["peak"] and len(row["tried"]) <= 6
    fitting = [t for t in row["tried"] if t["peak"] <= row["memory_bytes_per_device"]["capacity"]]
    assert {"microbatches": row["microbatches"], "remat": row["remat"]}.items() <= fitting[-1].items()
    assert row["remat"] != "full" or row["microbatches"] > 1


TWO_KINDS = "tpu-v5e:2x2", "tpu-v6e:2x2"


@pytest.mark.exhaustive
def test_compiling_for_two_kinds_of_tpu_at_once(small):
    import subprocess

    code = "import sys; from jaxlm.cli import main; sys.exit(main(sys.argv[1:]))"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, "compile", str(small), "--on", chips, "--workload", "decode", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for chips in TWO_KINDS
    ]  # fmt: skip
    for process, chips in zip(both, TWO_KINDS, strict=True):
        out, err = process.communicate()
        assert (process.returncode, err) == (0, f"compiling for {chips}\n") and json.loads(out)["fits"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "jit(train)/jvp(layers)/while/body/closed_call/attention/query/dot_general",
            "layers/attention/query/dot_general",
        ),
        ("jit(train)/transpose(jvp(layers))/while/body/add", "backward layers/add"),
        ("jit(train)/transpose(jvp(layers/norm))/mul", "backward layers/norm/mul"),
        ("jit(train)/transpose(jvp())/checkpoint/rematted_computation/layers/mul", "again layers/mul"),
        ("jit(train)/jvp(jit(_where))/select_n", "select_n"),
        ("jit(train)/adamw.<locals>.dropout_key/add", "dropout_key/add"),
        ("jit(train)/layers/attention/jit(_attend)/attend/mpmd_map", "layers/attention/attend"),  # Mosaic GPU's kernels
    ],
)
def test_scopes_are_those_of_the_model(name, shown):
    assert hlo.scope(name) == shown
