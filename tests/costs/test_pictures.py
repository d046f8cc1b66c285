"""Pictures of plans: what is in them, and where they are written."""

import json
import subprocess
import sys
from pathlib import Path

import model_fixtures
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from workload_fixtures import changed, workload

from jaxlm import config
from jaxlm.cli import main
from jaxlm.core.errors import InputError
from jaxlm.costs import pictures
from jaxlm.costs.counted import operations
from jaxlm.costs.hardware.catalog import find
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.plan import plan
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import Layout

MODELS = Path(__file__).parents[2] / "configs" / "models"
LLAMA = MODELS / "llama3.1-8b.toml"


def llama(kind: str, **changes) -> Workload:
    work = workload(kind, config.load(LLAMA).model, 8, 4096, remat="full" if kind == "train" else "none", kernels="xla")
    return changed(work, **changes)


def texts(figure: Figure) -> list:
    """Every text in a figure, laid out."""
    FigureCanvasAgg(figure).draw()
    return [text for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
@pytest.mark.parametrize("chip", ["h200-sxm", "tpu-v7x"])
def test_points_are_the_whole_step(kind, chip):
    target = Target.parse(chip)
    work = llama(kind, layout=Layout(fsdp=target.devices), optimizer="muon")
    found = pictures.points(work, target.chip)
    planned = plan(work, target)
    steps = operations.step(planned.work)
    assert {point.scope for point in found} == {op.scope for op in steps}
    assert sum(point.flops for point in found) == sum(op.times * op.flops for op in steps)
    assert sum(point.share for point in found) == pytest.approx(1.0)
    times = [point.seconds for point in found]
    assert times == sorted(times, reverse=True)
    bounds = planned.time
    assert bounds.lower_bound == pytest.approx(max(sum(times) * target.chip.devices_per_chip, bounds.collectives))
    roof = target.chip.peak(work.dtype)
    assert all(p.flops_per_s <= min(roof, target.chip.memory_bytes_per_s * p.intensity) * 1.001 for p in found)


def test_decoding_lies_on_the_slope_and_training_on_the_roof():
    chip = find("h200-sxm")
    heights = {
        kind: {p.scope: p.flops_per_s for p in pictures.points(llama(kind), chip)} for kind in ("train", "decode")
    }
    assert heights["train"]["layers/feed_forward/up"] == chip.peak("bfloat16")
    # Eight sequences: two FLOPs for each of eight tokens and each weight of two bytes.
    assert heights["decode"]["layers/feed_forward/up"] == pytest.approx(8 * chip.memory_bytes_per_s, rel=0.01)


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_names_do_not_overlap_and_stay_in_the_picture(kind):
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    pictures.operations_on_roof(axes, llama(kind, optimizer="muon"), find("tpu-v5e"))
    boxes = [Text.get_window_extent(text) for text in texts(figure)]  # an annotation's own holds its line too
    assert len(boxes) > 5
    boxes.sort(key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 for below, above in zip(boxes, boxes[1:], strict=False))
    width, height = figure.get_size_inches() * figure.dpi
    assert all(0 <= box.x0 and box.x1 <= width and 0 <= box.y0 and box.y1 <= height for box in boxes)


def test_memory_bars_say_what_fits():
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    plans = {kind: plan(llama(kind), Target.parse("h100-sxm5")) for kind in ("train", "decode")}
    pictures.memory_bars(axes, plans)
    over = (plans["train"].memory.total - plans["train"].capacity) / 2**30
    first, second = (text.get_text() for text in texts(figure))
    assert first.endswith(f"{over:.2f} GiB too much") and second.endswith("fits")
    drawn = sum(patch.get_width() for patch in axes.patches)
    assert drawn == pytest.approx(sum(p.memory.total for p in plans.values()) / 2**30)


@pytest.mark.parametrize("name", ["plan.png", "plan.PNG", "plan.svg", "plan.pdf"])
def test_a_file_of_every_format(name, tmp_path):
    pictures.draw(
        plan(workload("train", model_fixtures.model(), 16, 32, kernels="xla"), Target.parse("a100-sxm4-80g")),
        tmp_path / name,
    )
    (file,) = tmp_path.iterdir()
    assert file.name == name and file.stat().st_size > 5000


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("plan.docx", "has no ending of a picture; the endings are"),
        ("plan", "has no ending of a picture"),
        ("nowhere/plan.png", "cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_written(name, line, tmp_path):
    with pytest.raises(InputError, match=line):
        pictures.draw(
            plan(workload("decode", model_fixtures.model(), 16, 32, kernels="xla"), Target.parse("h100-sxm5")),
            tmp_path / name,
        )
    assert not list(tmp_path.iterdir())


def test_the_command_draws(tmp_path, capsys):
    file = tmp_path / "plan.png"
    arguments = ["plan", str(LLAMA), "--on", "h200-sxm:8", "training.sequence=4096", "--json", "--plot"]
    assert main([*arguments, str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["chips"] == 8
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, str(tmp_path / "plan.xyz")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("jaxlm: ") and said.err.count("\n") == 1


def test_no_global_state_is_touched():
    code = "import sys, jaxlm.costs.pictures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
