"""Chips with figures that a user or a published case gives."""

import pytest

from jaxlm import api, config
from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.catalog import catalog, find
from jaxlm.costs.hardware.chip_changes import figure_names, given_figures, with_figures
from jaxlm.costs.hardware.target import Target


def test_given_figures_take_the_place_of_the_catalogs():
    chip = find("h100-sxm5")
    changed = with_figures(chip, {"memory_bytes_per_s": 2.4e12, "link": {"domain": 4}, "usd_per_hour": 2.5})
    assert changed.memory_bytes_per_s == 2.4e12 and changed.link.domain == 4 and changed.link.bytes_per_s == 450e9
    assert changed.usd_per_hour == (2.5, 2.5) and changed.source("memory_bytes_per_s") == "given"
    assert given_figures(changed) == {"memory_bytes_per_s": 2.4e12, "link.domain": 4, "usd_per_hour": (2.5, 2.5)}
    assert changed.source("watts") == chip.source("watts") and given_figures(chip) == {}
    twice = with_figures(changed, {"watts": 500})
    assert given_figures(twice) == {**given_figures(changed), "watts": 500}


def test_nested_and_dotted_names_are_the_same():
    chip = find("tpu-v5e")
    assert with_figures(chip, {"peak_flops.int8": 3e14}) == with_figures(chip, {"peak_flops": {"int8": 3e14}})


def test_a_figure_that_follows_from_another_follows():
    chip = find("h100-sxm5")
    assert with_figures(chip, {"memory_bytes": 60e9}).device_capacity() == 60_000_000_000
    assert with_figures(chip, {"memory_bytes": 60e9, "device_memory_bytes": 59e9}).device_capacity() == 59_000_000_000
    assert with_figures(chip, {"link.links": 9}).link.bytes_per_s == 225e9
    assert with_figures(chip, {"link.links": 9, "link.bytes_per_s": 1e11}).link.bytes_per_s == 1e11


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({"memory_byte_per_s": 1e12}, "'memory_byte_per_s' is no figure of a chip; did you mean memory_bytes_per_s?"),
        ({"bandwith": 1e12}, "'bandwith' is no figure of a chip; there are memory_bytes_per_s, scale_out"),
        ({"peak_flops.bf16": 1e15}, "'peak_flops.bf16' is no figure of a chip; did you mean peak_flops."),
        ({"link_bytes_per_s": 1e9}, "did you mean link.bytes_per_s?"),
        ({"name": "mine"}, "'name' is no figure of a chip"),
        ({"watts": -1}, "watts of h100-sxm5: input should be greater than 0, not -1"),
        ({"watts": 1e-300}, "watts of h100-sxm5: input should be from 1e-12 to 1e24, not 1e-300"),
        ({"watts": "much"}, "watts of h100-sxm5: input should be a valid number"),
        ({"link.domain": 1.5}, "link.domain of h100-sxm5: input should be a valid integer"),
        ({"usd_per_hour": (1.0,)}, "usd_per_hour of h100-sxm5: "),
    ],
)
def test_bad_figures_are_refused_in_one_line(figures, line):
    with pytest.raises(InputError) as refused:
        with_figures(find("h100-sxm5"), figures)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_every_figure_of_the_catalog_can_be_given():
    names = set(figure_names())
    assert all(chip.figures().keys() <= names for chip in catalog().values())
    for chip in filter(lambda chip: chip.memory_bytes_per_s, catalog().values()):
        assert with_figures(chip, {"memory_bytes_per_s": chip.memory_bytes_per_s}).figures() == chip.figures()


def test_a_plan_is_on_the_chip_that_is_given():
    experiment = config.load("gpt2-124m", ["training.batch=8", "training.sequence=128"])
    usual = api.plan(experiment, "h100-sxm5").best
    chip = {"memory_bytes_per_s": 1e12, "usd_per_hour": 1.0}
    slow = api.plan(experiment, "h100-sxm5", chip=chip).best
    assert slow.time.memory > 3 * usual.time.memory and slow.row()["chip"] == {**chip, "usd_per_hour": (1.0, 1.0)}
    assert usual.row()["chip"] == {} and str(slow.target) == "h100-sxm5:1"
    assert Target.parse("h100-sxm5:8", {"link.domain": 4}).topology == (2, 4)
    with pytest.raises(
        InputError, match="all:8 plans on every chip; the figure watts is one chip's: name that in --on"
    ):
        api.plan(experiment, "all:8", chip={"watts": 1.0})
