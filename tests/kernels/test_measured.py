"""The table of measured implementations, and what None takes by it."""

import itertools
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec
from numerics import drawn

from kernels_pallas import explain, flash_attention, rms_norm
from kernels_pallas.bench import choose as table
from kernels_pallas.core import measured, target
from kernels_pallas.core.directions import by_direction
from kernels_pallas.core.measured import CallClass
from kernels_pallas.flash_attention import causal, cudnn, kernel_of

ROOT = Path(__file__).parents[2]
H100, H200, A100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"
TRACED = (jax.ShapeDtypeStruct((1, 8192), "int32"),) * 2


def on(kind, function, *arguments):
    """Return a function's result where programs are lowered for one device of a kind."""
    device = AbstractDevice(kind, 132, "tpu" if kind.startswith("TPU") else "gpu")
    mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return function(*arguments)


def operands(length, width, dtype="bfloat16"):
    return (jax.ShapeDtypeStruct((1, length, 2, width), dtype),) * 3


def _is_here(monkeypatch):
    """Let cuDNN be chosen, though there is none: the query stands for its result."""
    monkeypatch.setattr(cudnn, "is_absent", lambda: None)
    monkeypatch.setattr(cudnn, "flash_attention", lambda operands, *_: operands.query)


def test_the_committed_table_is_what_the_results_give():
    files = sorted(ROOT.glob(table.RESULTS))
    assert measured.TABLE.read_text(encoding="utf-8") == table.written(table.table(files, ROOT)), (
        "run: python -m kernels_pallas.bench.choose"
    )


def test_a_table_without_a_chip_that_it_had_says_so(tmp_path, monkeypatch, capsys):
    results = json.loads((ROOT / "benchmarks/results/h100-sxm5/kernels.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps(results | {"device": A100, "rows": results["rows"][:1]}))
    (tmp_path / "cpu.json").write_text(json.dumps(results | {"device": "cpu"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "TABLE", tmp_path / "table.json")
    table.main(["mine.json", "cpu.json"])
    wrote, without, unused = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote 1 rows of {A100} to ")
    assert without == f"it has no rows of {H100} any more: give their results files too"
    assert unused == "cpu.json: of a CPU, or a later file has all of its rows"


def test_rows_of_a_cpu_and_of_peers_are_left_out(tmp_path):
    results = json.loads((ROOT / "benchmarks/results/h100-sxm5/kernels.json").read_text())
    assert {row["implementation"] for row in results["rows"]} > {"torch_flash", "native_triton", "cudnn"}
    assert not {"torch_flash", "native_triton"} & {name for row in _rows() for name in row.milliseconds}
    assert not table.rows_of(results | {"device": "cpu"}, "there")
    gone = results | {"rows": [results["rows"][0] | {"case": "of another time"}]}
    with pytest.raises(ValueError, match="flash_attention has no case 'of another time' any more"):
        table.rows_of(gone, "there")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "Expecting"),
        (lambda text: "[]", "holds no results"),
        (lambda text: text.replace('"rows"', '"lines"'), "holds no results.*'rows'"),
        (lambda text: text.replace('"seconds": ', '"seconds": -'), "is no time in seconds"),
    ],
)
def test_a_file_of_no_results_is_refused_by_its_name(tmp_path, change, message):
    file = tmp_path / "kernels.json"
    file.write_text(change((ROOT / "benchmarks/results/h100-sxm5/kernels.json").read_text()))
    with pytest.raises(ValueError, match=f"kernels.json.*{message}"):
        table.table([file], tmp_path)


def test_the_command_writes_what_it_reads(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "benchmarks" / "results" / "h100-sxm5"
    folder.mkdir(parents=True)
    (folder / "kernels.json").write_bytes((ROOT / "benchmarks/results/h100-sxm5/kernels.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "TABLE", tmp_path / "measured.json")
    table.main([])
    assert (tmp_path / "measured.json").read_text() == measured.TABLE.read_text()
    assert "wrote 10 rows" in capsys.readouterr().out
    (folder / "kernels.json").unlink()
    with pytest.raises(SystemExit):
        table.main([])
    assert "run it in the repository" in capsys.readouterr().err


# What None takes on a GPU that is here: chip, width, mask, then differentiated with and without bit-equal gradients,
# and forward alone.
GOLDENS = [
    (H100, 64, "causal", ("triton", "cudnn", "cudnn")),
    (H100, 128, "causal", ("mosaic_gpu", "cudnn", "cudnn")),
    (H100, 128, "full", ("mosaic_gpu", "cudnn", "cudnn")),
    (H100, 256, "causal", ("mosaic_gpu", "cudnn", "cudnn")),
    (H100, 64, "traced", ("triton", "triton", "triton")),
    (H100, 128, "traced", ("mosaic_gpu", "mosaic_gpu", "triton")),
    (H100, 256, "traced", ("mosaic_gpu", "mosaic_gpu", "mosaic_gpu")),
    (H100, 96, "traced", ("triton", "triton", "triton")),  # Mosaic GPU takes multiples of 64
    (H200, 64, "causal", ("triton", "cudnn", "cudnn")),
    (H200, 128, "traced", ("mosaic_gpu", "mosaic_gpu", "triton")),
    (A100, 128, "causal", ("triton", "triton", "triton")),
    (A100, 256, "causal", ("triton", "triton", "triton")),
    (B200, 128, "causal", ("triton", "triton", "triton")),
    (B200, 256, "traced", ("triton", "triton", "triton")),
    ("TPU v5", 128, "causal", ("mosaic_tpu", "mosaic_tpu", "mosaic_tpu")),
    ("TPU v6 lite", 128, "traced", ("mosaic_tpu", "mosaic_tpu", "mosaic_tpu")),
]


@pytest.mark.parametrize(
    "kind, width, mask, wanted", [pytest.param(*row, id=f"{row[0]}-{row[1]}-{row[2]}") for row in GOLDENS]
)
def test_what_is_taken_on_each_chip(kind, width, mask, wanted, monkeypatch):
    key_range = {"causal": causal(8192), "full": None, "traced": TRACED}[mask]
    chip = target.of_kind("tpu" if kind.startswith("TPU") else "gpu", kind)
    ways = [dict(training=True, deterministic=True), dict(training=True, deterministic=False)]
    ways.append(dict(training=False, deterministic=True))
    counted = [kernel_of(chip, *operands(8192, width), key_range=key_range, **way) for way in ways]
    assert tuple(counted) == wanted

    # The same is said of the call itself, where the chip is here.
    _is_here(monkeypatch)

    def taken(deterministic):
        mask = () if key_range is TRACED else (key_range,)

        def call(query, key, value, *traced):
            return flash_attention(query, key, value, key_range=(mask or traced)[0], deterministic=deterministic)

        lines = on(kind, lambda: explain(call, *operands(8192, width), *([TRACED] if not mask else [])))
        return {line.split(":")[0]: line.split(": ")[1].split(",")[0] for line in lines}

    of_default, of_others = taken(True), taken(False)
    training, forward = "flash_attention, training", "flash_attention, forward"
    assert (of_default[training], of_others[training], of_default[forward]) == wanted
    assert of_others[forward] == of_default[forward]


def test_float32_has_no_rows_of_bfloat16():
    chip = target.of_kind("gpu", H100)
    assert (
        kernel_of(chip, *operands(8192, 128, "float32"), training=True, key_range=None, deterministic=True) == "triton"
    )
    assert measured.nearest("flash_attention", CallClass(128, 2**26, 32, "causal"), "training", chip) is None


@pytest.mark.parametrize(
    "call, case",
    [
        (CallClass(128, 2048**2, 16, "causal"), "causal 2048 × 128"),
        (CallClass(128, 1024**2, 16, "causal"), "causal 2048 × 128"),
        (CallClass(128, 5000**2, 16, "causal"), "causal 8192 × 128"),
        (CallClass(128, 2048**2, 16, "full"), "full 8192 × 128"),  # the mask before the size
        (CallClass(128, 8192**2, 16, "intervals"), "causal 8192 × 128"),
        (CallClass(80, 2048**2, 16, "causal"), "causal 8192 × 64"),  # the width before the size
        (CallClass(192, 8192**2, 16, "causal"), "causal 8192 × 256"),
    ],
)
def test_the_nearest_row(call, case):
    row = measured.nearest("flash_attention", call, "training", target.of_kind("gpu", H100))
    assert row.case == case and row.direction == "training"


def test_a_table_of_another_chip_is_said():
    query = operands(2048, 128)
    own, of_h200, of_a100 = (
        on(kind, lambda: explain(flash_attention, *query, key_range=causal(2048))) for kind in (H100, H200, A100)
    )
    assert len(own) == 2
    for line in own:
        assert "in the row: causal 2048 × 128" in line and "benchmarks/results/h100-sxm5/kernels.json" in line
        assert "no rows" not in line
        assert "not cudnn: it cannot be compiled ahead of time, and there is no GPU here" in line
    assert all("NVIDIA H200 has no rows, and the same compute capability" in line for line in of_h200)
    assert all(f"no measured row is of such a call on {A100}" in line and "H100" not in line for line in of_a100)
    nearest = on(H100, lambda: explain(flash_attention, *operands(1024, 128), key_range=causal(1024)))
    assert all("in the row nearest to causal width 128 size 1,048,576: causal 2048 × 128" in line for line in nearest)
    narrow = on(H100, lambda: explain(flash_attention, *operands(2048, 24), key_range=causal(2048)))
    assert all(
        "xla, the first that supports it, as none does in the row nearest to causal width 24" in x for x in narrow
    )


def test_all_operations_are_explained():
    x = jax.ShapeDtypeStruct((16, 256), "bfloat16")
    (line,) = on(H100, lambda: explain(rms_norm, x))
    assert line.startswith("rms_norm, training: triton, the first that supports the call, as no measured row")
    (line,) = on(H100, lambda: explain(lambda x: rms_norm(rms_norm(x)), x))  # a choice is said once
    assert explain(rms_norm, x) == (
        "rms_norm, training: reference, the first that supports the call, as no measured row is of "
        "such a call on cpu; not triton: it runs on NVIDIA GPUs from Ampere on, and this is "
        "lowered for cpu (cpu); not mosaic_tpu: it runs on TPU v4 and later, and this is "
        "lowered for cpu (cpu)",
    )
    assert explain(rms_norm, x, implementation="reference") == ()


def test_a_call_runs_by_direction():
    """On Hopper a forward pass alone of width 128 is Triton's, and a differentiated one is Mosaic GPU's."""
    x = jnp.zeros((1, 2048, 2, 128), jnp.bfloat16)

    def call(x):
        return flash_attention(x, x, x, key_range=causal(2048))

    def gradient(x):
        return jax.grad(lambda x: call(x).astype(jnp.float32).sum())(x)

    def kernels(function):
        program = on(H100, lambda: str(jax.make_jaxpr(function)(x)))
        return "num_warps" in program, "wgmma" in program

    assert (kernels(call), kernels(gradient)) == ((True, False), (False, True))


@pytest.mark.parametrize("manual", [False, True])
def test_both_directions_compute_the_same(manual):
    """Test values and gradients of a call with two implementations, also of operands that a mesh replicates."""
    x, scale = drawn((4, 3), (1, 3))
    row = jnp.arange(4)[:, None]

    def one(row, x, scale):
        return jnp.sin(x * scale) * row

    def other(row, x, scale):
        return row * jnp.sin(scale * x)

    def losses(function):
        def over(row, x, scale):
            return jax.lax.psum(jnp.sum(function(row, x, scale) ** 2), ("data",) if manual else ())

        if not manual:
            return over
        mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
        rows = PartitionSpec("data")
        return jax.shard_map(over, mesh=mesh, in_specs=(rows, rows, PartitionSpec()), out_specs=PartitionSpec())

    wanted = jax.value_and_grad(losses(one), argnums=(1, 2))(row, x, scale)
    got = jax.value_and_grad(losses(lambda *arrays: by_direction(one, other, *arrays)), argnums=(1, 2))(row, x, scale)
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)


def test_which_function_runs_is_decided_by_the_gradient():
    def call(x):
        return by_direction(lambda x: 2 * x, lambda x: 3 * x, x)

    assert call(1.0) == 2 and jax.jit(call)(1.0) == 2
    assert jax.vjp(call, 1.0)[0] == 3 and jax.grad(jax.checkpoint(call))(1.0) == 3
    assert list(itertools.chain(jax.vmap(call)(jnp.ones(2)))) == [2, 2]


def test_cudnn_is_not_differentiated_unless_runs_may_differ(monkeypatch):
    _is_here(monkeypatch)
    x = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)

    def gradient(**options):
        def loss(x):
            return flash_attention(x, x, x, implementation="cudnn", **options).astype(jnp.float32).sum()

        return lambda: jax.eval_shape(jax.grad(loss), x)

    on(H100, lambda: jax.eval_shape(lambda x: flash_attention(x, x, x, implementation="cudnn"), x))
    on(H100, gradient(deterministic=False))
    with pytest.raises(NotImplementedError, match="cudnn cannot serve this call: its gradients differ from run to run"):
        on(H100, gradient())


def _rows():
    return measured._table(measured.TABLE)
