"""What `jaxlm compile` refuses before it compiles. What it compiles: tests/lowering/test_report.py."""

import pytest

from jaxlm.cli import main

MODEL = "configs/models/qwen3-0.6b.toml"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--on", "h200-sxm:8"], "CONFIG"),
        ([MODEL], "--on"),
        ([MODEL, "--on", "h200sxm:8"], "did you mean h200-sxm?"),
        ([MODEL, "--on", "trainium2"], "XLA compiles for NVIDIA's GPUs and for TPUs"),
        ([MODEL, "--on", "tpu-v5e:5x5"], "no slice of 5x5"),
        ([MODEL, "--on", "h200-sxm:8", "--mesh", "fsdp=3"], "does not divide model.width"),
        ([MODEL, "--on", "h200-sxm:8", "--mesh", "model=8"], "--mesh 'model=8' is not AXIS=N"),
        ([MODEL, "--on", "h200-sxm:8", "--mesh", "auto"], "--mesh 'auto' is not AXIS=N"),
        ([MODEL, "--on", "h200-sxm:8", "--mesh", "fsdp=8", "mesh.data=2"], "leave out mesh.data, or --mesh"),
        ([MODEL, "--on", "h200-sxm:8", "--fit", "--workload", "decode"], "--fit turns microbatches"),
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
