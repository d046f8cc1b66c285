"""The catalog: figures that are sane and have sources, targets good and bad."""

import math
import re
import tomllib
from importlib import resources

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.catalog import catalog, find, register
from jaxlm.costs.hardware.chips import DTYPES, Chip, Link, canonical_dtype
from jaxlm.costs.hardware.target import Target, of_devices

CHIPS = list(catalog().values())
VENDORS = resources.files("jaxlm.costs.hardware") / "vendors"
TPUS = [chip for chip in CHIPS if chip.kind == "tpu"]
# Their memory belongs to the board, or nobody publishes its rate.
WITHOUT_MEMORY = {"versal-vc1902": "memory_bytes", "jetson-agx-thor": "memory_bytes_per_s"}
GIB = 2**30


def refusal(call, *arguments) -> str:
    with pytest.raises(InputError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_there_are_61_chips_and_each_is_found_by_its_id():
    assert len(CHIPS) == 61 and all(find(id) is chip and chip.id == id for id, chip in catalog().items())


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.id)
class TestEveryChip:
    def test_every_figure_has_a_source(self, chip):
        backed = {figure for figures in chip.sources.values() for figure in figures}
        # What names a thing or is the rule needs no source; a sum of links has that of the links.
        named = {"on_chip.core", "link.kind", "link.topology"} | ({"devices_per_chip"} if chip.libtpu_name else set())
        if "link.link_bytes_per_s" in chip.figures():
            named |= {"link.bytes_per_s"}
        figures = {name for name, value in chip.figures().items() if (name, value) != ("devices_per_chip", 1)}
        assert not {name for name in figures - named if not chip.source(name)}
        known = {part for name in figures for part in (name, name.partition(".")[0])}
        assert not backed - known, "a source backs a figure that is not there"

    def test_a_source_is_an_address_or_says_what_it_is(self, chip):
        kinds = r"(https?://\S+|github:[\w.-]+/[\w.-]+:[\w./-]+)( \(.+\))?|derived: .+|CUDA device .+|libtpu, .+"
        kinds += r"|measured: benchmarks/results/\S+"
        assert chip.sources and all(re.fullmatch(kinds, source) for source in chip.sources)
        assert "recalled" not in f"{chip.sources}{chip.notes}"

    def test_units_are_sane(self, chip):
        assert all(1e12 <= peak <= 1e17 for peak in chip.peak_flops.values())
        assert chip.watts is None or 50 <= chip.watts <= 25_000
        for rate in (chip.host_bytes_per_s, chip.scale_out_bytes_per_s, chip.link and chip.link.bytes_per_s):
            assert rate is None or 1e9 <= rate < (chip.memory_bytes_per_s or 1e12)
        if chip.usd_per_hour:
            low, high = chip.usd_per_hour
            assert 0.1 < low <= high < 100
        if chip.id in WITHOUT_MEMORY:
            assert f"no published {WITHOUT_MEMORY[chip.id]}" in refusal(chip.figure, WITHOUT_MEMORY[chip.id])
        else:
            assert 1e8 < chip.memory_bytes < 1e12 and 1e10 < chip.memory_bytes_per_s < 1e17
        if chip.device_memory_bytes:
            assert 0.9 < chip.device_memory_bytes * chip.devices_per_chip / chip.memory_bytes < 1.01
        if chip.link and chip.link.link_bytes_per_s:
            assert chip.link.bytes_per_s == pytest.approx(chip.link.links * chip.link.link_bytes_per_s)

    def test_balance_is_that_of_a_real_chip(self, chip):
        """Intensities of bfloat16 lie between an enthusiast's machine and the largest accelerators; a sparse peak, a
        unit that is wrong by 8, or GB for GiB in bandwidth falls out. Meta's chip has LPDDR5."""
        if "bfloat16" in chip.peak_flops:
            if chip.memory_bytes_per_s:
                assert 25 < chip.intensity("bfloat16") < (900 if chip.id == "mtia-v2" else 600)
        else:
            assert "no published peak for bfloat16" in refusal(chip.peak, "bf16")


def test_a_file_has_the_chips_of_its_vendor_and_no_paths_of_a_machine():
    ids = []
    for file in sorted(VENDORS.iterdir()):
        text = file.read_text(encoding="utf-8")
        chips = tomllib.loads(text)
        assert {chip["vendor"] for chip in chips.values()} == {file.stem.partition("_")[0]}
        assert not re.search(r"/(work|root|home|tmp)/", text) and "sparse_" not in text
        ids += chips
    assert ids == list(catalog())


@pytest.mark.parametrize(
    ("chip", "dtype", "peak"),
    [
        ("h100-sxm5", "bfloat16", 989.4e12),  # 1979e12 is sparse
        ("h200-sxm", "fp8", 1978.9e12),
        ("a100-sxm4-80g", "float32", 156e12),  # TF32, as XLA multiplies float32 by default
        ("a10g", "float32", 35e12),
        ("rtx4090", "bf16", 165.2e12),  # summed in float32
        ("b300-hgx", "int8", 153.5e12),
        ("trainium2", "bf16", 667e12),
        ("mi300x", "float32", 163.4e12),
        ("tpu-v4", "int8", 275e12),
        ("tpu-v5e", "bf16", 197e12),
        ("tpu-v5p", "float32", 459e12),  # one bfloat16 pass
        ("tpu-v6e", "int8", 1836e12),
        ("tpu-v7x", "float8_e4m3fn", 4614e12),
    ],
)
def test_peaks_are_dense(chip, dtype, peak):
    assert find(chip).peak(dtype) == peak


@pytest.mark.parametrize(
    ("said", "name"),
    [
        *zip(DTYPES, DTYPES, strict=True),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("f32", "float32"),
        ("FP8", "float8"),
        ("float8_e5m2", "float8"),
        ("float8_e4m3b11fnuz", "float8"),
        ("float4_e2m1fn", "float4"),
        ("nvfp4", "float4"),
        ("mxfp8", "float8"),
        ("s8", "int8"),
        (jnp.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (np.dtype("int8"), "int8"),
        (jnp.dtype("float8_e4m3fn"), "float8"),
    ],
)
def test_a_type_has_one_name(said, name):
    assert canonical_dtype(said) == name


@pytest.mark.parametrize("said", ["float64", "fp16_acc16", "", "bfloat8", "quick", "float", "uint8"])
def test_what_is_no_type_is_refused(said):
    assert "bfloat16" in refusal(canonical_dtype, said)


def test_absent_figures_are_refused_by_name():
    v5e = find("tpu-v5e")
    assert v5e.figure("link.bytes_per_s") == 200e9
    assert refusal(v5e.figure, "watts") == "tpu-v5e has no published watts; give one with --chip watts=NUMBER"
    assert "apple-m1 has no published link.bytes_per_s;" in refusal(find("apple-m1").figure, "link.bytes_per_s")
    assert refusal(v5e.peak, "fp8") == (
        "tpu-v5e has no published peak for float8, only for bfloat16, int8, int4; "
        "give one with --chip peak_flops.float8=FLOP/s"
    )
    with pytest.raises(AttributeError):
        v5e.figure("wats")


@pytest.mark.parametrize(
    ("tpu", "gib"), [("tpu-v4", 30.75), ("tpu-v5e", 15.75), ("tpu-v5p", 95.73), ("tpu-v6e", 31.24), ("tpu-v7x", 94.74)]
)
def test_the_capacity_of_a_device_is_the_compilers(tpu, gib):
    assert find(tpu).device_capacity() == pytest.approx(gib * GIB)


def test_more_than_the_nominal_capacity_is_explained():
    for chip in CHIPS:
        if chip.id not in WITHOUT_MEMORY and chip.device_capacity() * chip.devices_per_chip > chip.memory_bytes:
            assert chip.notes.startswith("memory_bytes is"), chip.id


def test_capacity_without_a_compiler_is_nominal():
    assert find("mi300x").device_capacity() == 206_141_652_992


def test_unknown_keys_and_changes_are_refused():
    chip = find("tpu-v5e")
    with pytest.raises(ValidationError):
        Chip(**{**chip.model_dump(), "memory": 1})
    with pytest.raises(ValidationError):
        chip.watts = 1.0


def test_a_misspelt_key_of_a_registered_chip_names_the_nearest():
    figures = find("tpu-v5e").model_dump(exclude={"id"})
    line = refusal(register, "mine", {**figures, "memory_byte": 1})
    assert line == "a registered chip, [mine] memory_byte: unknown key; did you mean memory_bytes?"


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("h100-pci", "h100-pcie"),
        ("h2000", "h200-sxm"),
        ("tpu-v5", "tpu-v5"),
        ("B201", "b200-hgx"),
        ("h300", "h800-sxm5"),
        ("hots", "host"),
    ],
)
def test_a_wrong_id_names_the_nearest(wrong, near):
    assert f"did you mean {near}" in refusal(find, wrong)


@pytest.mark.parametrize("wrong", ["quantum", "", "x" * 1000])
def test_an_id_that_is_near_to_nothing_says_where_to_look(wrong):
    assert "jaxlm hardware" in refusal(find, wrong)


@pytest.mark.parametrize(
    ("text", "topology", "chips", "devices"),
    [
        ("h200-sxm", (1, 1), 1, 1),
        ("h200-sxm:8", (1, 8), 8, 8),
        ("h200-sxm:16", (2, 8), 16, 16),
        ("h200-sxm:2x4", (2, 4), 8, 8),
        ("h100-sxm5:16384", (2048, 8), 16384, 16384),
        ("gb200-nvl72:144", (2, 72), 144, 144),
        ("rtx4090:3", (1, 3), 3, 3),
        ("rtx5090:4096", (512, 8), 4096, 4096),  # servers of eight
        ("a10g:16", (2, 8), 16, 16),
        ("apple-m1:1", (1, 1), 1, 1),
        ("trainium2:32", (2, 16), 32, 32),
        ("tpu-v5e:4x4", (4, 4), 16, 16),
        ("tpu-v5e", (1, 1), 1, 1),
        ("tpu-v6e:128", (8, 16), 128, 128),
        ("tpu-v6e:16x16", (16, 16), 256, 256),
        ("tpu-v4", (2, 2, 1), 4, 4),
        ("tpu-v4:16x16x16", (16, 16, 16), 4096, 4096),
        ("tpu-v5p:64", (4, 4, 4), 64, 64),
        ("tpu-v5p:512", (8, 8, 8), 512, 512),
        ("tpu-v5p:16x20x28", (16, 20, 28), 8960, 8960),
        ("tpu-v7x:2x2x1", (2, 2, 1), 4, 8),
        ("tpu-v7x:9216", (16, 24, 24), 9216, 18432),
    ],
)
def test_targets(text, topology, chips, devices):
    target = Target.parse(text)
    assert (target.topology, target.chips, target.devices) == (topology, chips, devices)
    assert target.chip is find(text.partition(":")[0])
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h20-sxm:8", "did you mean h200-sxm?"),
        ("h200-sxm:", "such as h200-sxm:8"),
        ("h200-sxm:0", "such as h200-sxm:8"),
        ("h200-sxm:-8", "COUNT"),
        ("h200-sxm:8.0", "COUNT"),
        ("h200-sxm:8:8", "COUNT"),
        ("h200-sxm:" + "9" * 5000, "COUNT"),
        ("h200-sxm:eight", "COUNT"),
        ("h200-sxm:12", "take 8 or 16"),
        ("h200-sxm:2x16", "at most 8"),
        ("h200-sxm:2x2x2", "NODESxCHIPS"),
        ("gb200-nvl72:100", "take 72 or 144"),
        ("rtx4090:12", "take 8 or 16"),
        ("apple-m4-pro:", "such as apple-m4-pro"),
        ("versal-vc1902", "has no published memory_bytes; give that of its board with --chip memory_bytes=NUMBER"),
        ("apple-m4-pro:2", "write apple-m4-pro for one"),
        ("tpu-v5e:4x5", "the nearest are 4x4 (16 chips), 4x8 (32 chips)"),
        ("tpu-v5e:8x4", "the nearest are 4x8 (32 chips)"),
        ("tpu-v5e:32x32", "the nearest are 16x16"),
        ("tpu-v6e:4x4x4", "the nearest are 8x8"),
        ("tpu-v5e:48", "no slice of 48 chips; the nearest are 8x8 (64 chips)"),
        ("tpu-v4:6x6x6", "no slice of 6x6x6; the nearest are"),
        ("tpu-v4:20x20x20", "(4096 chips)"),
        ("tpu-v5p:4x4", "no slice of 4x4; the nearest are 2x2x4 (16 chips)"),
        ("tpu-v7x:3", "the nearest are 2x2x1 (4 chips)"),
        ("tpu-v5e:4x", "such as tpu-v5e:8x8"),
    ],
)
def test_bad_targets(text, said):
    assert said in refusal(Target.parse, text)


@pytest.mark.parametrize(
    ("text", "wraparound"),
    [
        ("tpu-v5e:4x4", (False, False)),
        ("tpu-v5e:8x16", (False, True)),
        ("tpu-v6e:16x16", (True, True)),
        ("tpu-v4:2x2x4", (False, False, False)),  # the optical switches join whole cubes
        ("tpu-v5p:4x4x8", (True, True, True)),
        ("h200-sxm:8", ()),
    ],
)
def test_ends_of_axes_are_joined(text, wraparound):
    assert Target.parse(text).wraparound == wraparound


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.id)
def test_slices_fill_a_pod_and_no_more(chip):
    legal = chip.legal_slices()
    assert math.prod(legal[-1]) == chip.link.domain and len(set(legal)) == len(legal)
    assert all(len(slice) == chip.link.axes for slice in legal)
    assert all(size % 4 == 0 for slice in legal if math.prod(slice) > 64 and chip.link.axes == 3 for size in slice)


def test_the_rate_of_all_links_is_their_sum():
    link = Link(kind="wire", topology="mesh", links=7, link_bytes_per_s=2e9)
    assert link.bytes_per_s == 14e9 and link.wraps((4, 4)) == (False, False)


@pytest.mark.parametrize(
    ("kind", "platform", "count", "target"),
    [
        ("NVIDIA H200", "gpu", 8, "h200-sxm:8"),
        ("TPU v5 lite", "tpu", 16, "tpu-v5e:4x4"),
        ("TPU7x", "tpu", 8, "tpu-v7x:2x2x1"),
    ],
)
def test_devices_that_are_here_are_a_target(kind, platform, count, target):
    assert str(of_devices(kind, platform, count)) == target


def test_every_kind_of_device_is_one_chip():
    kinds = [kind for chip in catalog().values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    with pytest.raises(InputError, match="'Abacus' are not in the catalog"):
        of_devices("Abacus", "gpu", 1)


@pytest.mark.parametrize(
    ("alias", "id"),
    [("h100", "h100-sxm5"), ("H200", "h200-sxm"), ("a100", "a100-sxm4-80g"), ("b200", "b200-hgx"), ("v5e", "tpu-v5e")],
)
def test_an_alias_is_the_usual_part(alias, id):
    assert find(alias) is find(id)
    assert str(Target.parse(f"{alias}:8")) == str(Target.parse(f"{id}:8"))


def test_no_two_chips_have_one_name():
    names = [name for chip in catalog().values() for name in (chip.id, *chip.aliases)]
    assert len(names) == len(set(names)) and all(name == name.lower() for name in names)
