"""Input that `jaxlm compile` refuses, and its report of a program that a compiler rejects.

Compiled programs are tested in tests/lowering/test_report.py.
"""

import json
from pathlib import Path

import pytest

from jaxlm import config
from jaxlm.cli import main
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.workload import Workload
from jaxlm.lowering import report
from jaxlm.lowering.held_memory import CompiledMemory
from jaxlm.lowering.report import DoesNotFit, Report
from jaxlm.parallel.layout import Layout

MODEL = "configs/models/qwen3-0.6b.toml"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--on", "h200-sxm:8"], "CONFIG"),
        ([MODEL], "--on"),
        ([MODEL, "--on", "h200sxm:8"], "did you mean h200-sxm?"),
        ([MODEL, "--on", "trainium2"], "XLA compiles for NVIDIA's GPUs and for TPUs"),
        ([MODEL, "--on", "tpu-v5e:5x5"], "no slice of 5x5"),
        ([MODEL, "--on", "h200-sxm:8", "--mesh", "fsdp=3"], "does not divide model.d_model"),
        ([MODEL, "--on", "h200-sxm:8", "--mesh", "model=8"], "--mesh 'model=8' is not AXIS=N"),
        ([MODEL, "--on", "h200-sxm:8", "--mesh", "auto"], "--mesh 'auto' is not AXIS=N"),
        ([MODEL, "--on", "h200-sxm:8", "--mesh", "fsdp=8", "mesh.data=2"], "leave out mesh.data, or --mesh"),
        ([MODEL, "--on", "h200-sxm:8", "--fit", "--workload", "decode"], "--fit varies microbatches"),
        ([MODEL, "--on", "h200-sxm:8", "--quick"], "--quick is for TPUs"),
        ([MODEL, "--on", "h200-sxm:8", "--dump", "pyproject.toml"], "(Not a directory); give a directory"),
        ([MODEL, "--on", "h200-sxm:8", "--dump", "/proc/programs"], "--dump /proc/programs cannot be written to"),
        ([MODEL, "--on", "h200-sxm:8", "--dump", ""], "argument --dump: '' is no path"),
        ([MODEL, "--on", "h200-sxm:8", "training.batsch=8"], "did you mean training.batch?"),
        ([MODEL, "--on", "h200-sxm:8", "training.batch=12"], "set training.batch to 16"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_status_2(arguments, said, capsys):
    assert main(["compile", *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_where_the_compiler_refuses_the_row_has_the_keys_of_a_report(monkeypatch, capsys):
    def refuse(experiment, kind, target, mesh, quick):
        counted = plan(Workload.of(experiment, Layout(mesh.shape), kind), target)
        raise DoesNotFit(counted, False, 1.5, 10**9, 10**11, {"stablehlo.mlir": "module"}, "E1000")

    monkeypatch.setattr(report, "compile", refuse)
    arguments = [MODEL, "--on", "tpu-v5e:4x4", "--mesh", "tensor=16", "training.sequence=4096"]
    assert main(["compile", *arguments, "--json"]) == 1
    out, errors = capsys.readouterr()
    row = json.loads(out)
    experiment, target = config.load(Path(MODEL), ["training.sequence=4096"]), Target.parse("tpu-v5e:4x4")
    counted = plan(Workload.of(experiment, Layout(tensor=16)), target)
    whole = Report(counted, False, 1.5, CompiledMemory(1, 1, 1, 3, 0, 1), (), 1, 0.0, (), (), (), ()).row()
    assert row.keys() == whole.keys() | {"suggestions"}
    assert row["memory_bytes_per_device"].keys() == whole["memory_bytes_per_device"].keys()
    assert row["counted"].keys() == whole["counted"].keys()
    assert row["compile_s"] == 1.5 and row["flops_per_device"] is None and row["collectives"] == row["kernels"] == []
    assert row["replicated_kv_heads"] and "mesh.tensor = 16 does not divide 8 key/value heads" in errors
    assert errors.splitlines()[-1] == "compiling for tpu-v5e:4x4"
