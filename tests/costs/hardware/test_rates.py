"""Sustained rates: the file, what chips without measurements take from others, and look-ups between sizes."""

import math

import pytest

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.catalog import catalog, find, register, unregister
from jaxlm.costs.hardware.rates import sustained
from jaxlm.costs.hardware.sustained import ProductRates, Sustained, at, sustained_rates

CHIPS = list(catalog().values())
TABLES = sustained_rates()
KINDS = ("pass", "norm", "rms_norm", "activation", "gated", "rope", "add", "optimizer", "weights", "cache")
# Switches reduce on the way: less goes over a link than the ring counts by which bus bandwidth is defined.
REDUCED_BY_SWITCHES = "all-reduce"


def entries(table: Sustained):
    return [*table.products, *table.passes, *table.attention, *table.collectives, *table.links, *table.launches]


class TestTheFile:
    def test_every_entry_has_an_address_and_no_figure_is_from_memory(self):
        for id, table in TABLES.items():
            for entry in entries(table):
                starts = ("github:", "https://", "benchmarks/results/", "derived:")
                assert entry.source.startswith(starts), (id, entry)
                assert "recalled" not in entry.source + entry.derived

    def test_every_table_is_of_a_chip_and_so_is_what_it_is_like(self):
        assert set(TABLES) - set(catalog()) == {"generic-gpu", "generic"}
        for table in TABLES.values():
            assert table.like is None or table.like in TABLES

    def test_no_rate_is_above_the_published_one(self):
        for chip in CHIPS:
            for entry in (*chip.sustained.products, *chip.sustained.attention):
                assert all(rate <= chip.peak(entry.dtype) for _, rate in entry.rates), (chip.id, entry)
            for entry in chip.sustained.passes:
                assert all(rate <= chip.memory_bytes_per_s or _in_cache(size, chip) for size, rate in entry.rates)
            for entry in chip.sustained.collectives:
                if entry.kind != REDUCED_BY_SWITCHES:
                    assert entry.bus_bytes_per_s <= 1.05 * chip.link.bytes_per_s, (chip.id, entry)

    def test_spreads_are_those_of_measurements(self):
        assert all(0.03 <= entry.spread <= 0.5 for table in TABLES.values() for entry in entries(table))

    def test_training_is_slower_than_its_forward_pass_allows(self):
        """Both passes take longer than the forward pass alone."""
        for chip in CHIPS:
            of = {(e.kernel, e.mask, e.head_dim, e.direction): e.rates for e in chip.sustained.attention}
            for (kernel, mask, head_dim, direction), training in of.items():
                forward = of.get((kernel, mask, head_dim, "forward"))
                if direction == "training" and forward:
                    for size in (512, 4096, 16384):
                        assert 3.5 / at(training, size) > 1.2 / at(forward, size), (chip.id, kernel, mask, head_dim)


def _in_cache(size: float, chip) -> bool:
    """True if half of what a pass moves stays in the cache for the next."""
    return size <= 2 * chip.on_chip.l2_bytes


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.id)
def test_every_chip_resolves_every_look_up(chip):
    rates = sustained(chip)
    for dtype in chip.peak_flops:
        for side in (1, 100, 8192, math.inf):
            rate, spread = rates.product(dtype, side)
            assert 0 < rate <= chip.peak(dtype) and 0.03 <= spread < 0.6
    for kind in KINDS if chip.memory_bytes_per_s else ():
        rate, spread = rates.moving(kind, 1e9)
        assert 0 < rate <= chip.memory_bytes_per_s and 0.03 <= spread < 0.6
    for dtype in {"bfloat16", "float16"} & set(chip.peak_flops):
        for kernel in ("flash-1-triton", "flash-2", "flash-3", "cudnn", "splash", "triton", "mosaic_gpu", "mosaic_tpu"):
            for causal in (True, False):
                passes = {
                    d: rates.attention(kernel, d, causal, 128, 2048, dtype) for d in ("forward", "backward", "training")
                }
                assert all(0 < rate < chip.peak(dtype) and 0.03 <= spread < 0.6 for rate, spread in passes.values())
    for link in ("domain", "network"):
        assert 0 < rates.link(link).share <= 1
    assert 0 < rates.kernel_s < 5e-6


class TestWhatIsLike:
    """The A100 of 40 GB has no measurement: it is like that of 80 GB."""

    own, other = sustained(find("a100-sxm4-80g")), sustained(find("a100-sxm4-40g"))

    def test_rates_are_in_proportion_to_published_figures(self):
        one, two = (find(id) for id in ("a100-sxm4-80g", "a100-sxm4-40g"))
        assert self.other.product("bfloat16", 4096)[0] == self.own.product("bfloat16", 4096)[0]
        scale = two.memory_bytes_per_s / one.memory_bytes_per_s
        assert self.other.moving("pass", 1e8)[0] == pytest.approx(scale * self.own.moving("pass", 1e8)[0])

    def test_the_spread_is_wider(self):
        assert self.other.product("bfloat16", 4096)[1] == pytest.approx(self.own.product("bfloat16", 4096)[1] + 0.1)
        assert self.other.moving("weights", 1e8)[1] == pytest.approx(self.own.moving("weights", 1e8)[1] + 0.1)

    def test_a_collective_goes_over_the_link_of_the_chip(self):
        h100, h800 = (sustained(find(id)).collective("all-gather", 8, 1e9) for id in ("h100-sxm5", "h800-sxm5"))
        assert h800.bus_bytes_per_s / h100.bus_bytes_per_s == pytest.approx(200 / 450)

    def test_a_registered_chip_takes_the_shares_of_the_chip_it_names(self):
        figures = {"name": "n", "vendor": "v", "kind": "asic", "peak_flops": {"bfloat16": 1e14}, "sources": {}}
        memory = {"memory_bytes": 2**30, "memory_bytes_per_s": 1e12}
        register("a-chip-like-v5e", {**figures, **memory, "sustained": {"like": "tpu-v5e"}})
        try:
            rate, spread = sustained(find("a-chip-like-v5e")).product("bfloat16", 8192)
        finally:
            unregister("a-chip-like-v5e")
        own = sustained(find("tpu-v5e")).product("bfloat16", 8192)
        assert rate / 1e14 == pytest.approx(own[0] / find("tpu-v5e").peak("bfloat16")) and spread > own[1]

    def test_a_chip_that_is_like_itself_is_refused(self):
        chip = find("tpu-v5e").model_copy(update={"id": "odd", "sustained": Sustained(like="tpu-v5p")})
        assert sustained(chip).product("bfloat16", 8192)
        register(
            "odd", chip.model_dump(exclude={"id", "sustained"}, exclude_none=True) | {"sustained": {"like": "odd"}}
        )
        try:
            with pytest.raises(InputError, match="odd is like odd"):
                sustained(find("odd"))
        finally:
            unregister("odd")

    def test_another_bandwidth_scales_the_measured_one(self):
        chip = find("h100-sxm5")
        slower = chip.model_copy(update={"memory_bytes_per_s": chip.memory_bytes_per_s / 2})
        assert sustained(slower).moving("pass", 1e8)[0] == pytest.approx(sustained(chip).moving("pass", 1e8)[0] / 2)


class TestLookUps:
    h100 = sustained(find("h100-sxm5"))

    def test_a_causal_kernel_loses_ever_less_to_one_without_a_mask_beyond_the_longest_measured_length(self):
        full, _ = self.h100.attention("flash-2", "training", False, 128, 16384)
        rates = [self.h100.attention("flash-2", "training", True, 128, 16384 * 2**n)[0] for n in range(6)]
        losses = [full / rate - 1 for rate in rates]
        assert losses[0] > 0.02
        assert losses[1:5] == pytest.approx([losses[0] / 2**n for n in range(1, 5)], rel=0.01)
        assert losses[5] == losses[4]

    def test_sizes_are_interpolated_on_a_logarithmic_scale(self):
        curve = ((16.0, 10.0), (64.0, 30.0))
        assert [at(curve, size) for size in (1, 16, 32, 64, 1000)] == pytest.approx([10, 10, 20, 30, 30])

    def test_a_head_dimension_lies_between_two_that_were_measured(self):
        narrow, between, wide = (self.h100.attention("flash-2", "forward", True, d, 2048)[0] for d in (64, 80, 128))
        assert narrow < between < wide
        assert self.h100.attention("flash-2", "forward", True, 32, 2048)[0] == pytest.approx(narrow / 2)

    def test_both_passes_take_the_time_of_training(self):
        forward, backward, training = (
            self.h100.attention("flash-2", direction, True, 128, 4096)[0]
            for direction in ("forward", "backward", "training")
        )
        assert 1 / forward + 2.5 / backward == pytest.approx(3.5 / training)

    def test_a_kernel_of_another_era_has_its_own_rate(self):
        """LLM Foundry's of 2023 is 2.2 times slower than FlashAttention 2."""
        a100 = sustained(find("a100-sxm4-80g"))
        old, new = (a100.attention(name, "training", True, 128, 4096)[0] for name in ("flash-1-triton", "flash-2"))
        assert new / old == pytest.approx(173 / 3.5 * (1 / 129.6 + 2.5 / 66.8), rel=0.001)
        assert 2.2 < new / old < 2.3

    def test_a_stand_in_widens_the_spread(self):
        standing, own = (self.h100.attention(name, "forward", True, 128, 2048) for name in ("trtllm", "flash-3"))
        assert standing[0] != own[0]
        a100 = sustained(find("a100-sxm4-80g"))
        cudnn, flash = (a100.attention(name, "training", True, 128, 2048) for name in ("cudnn", "flash-2"))
        assert cudnn[0] == flash[0] and cudnn[1] > flash[1]

    def test_a_message_has_the_rates_of_its_size(self):
        small, large = (self.h100.collective("all-reduce", 8, size) for size in (1e4, 1e9))
        assert small.floor_s < 2e-5 < large.floor_s and large.bus_bytes_per_s > 4e11
        engine, as_large = (self.h100.collective("all-reduce", 8, size, "custom") for size in (1e4, 1e9))
        assert engine.floor_s < 6e-6 and as_large == large
        assert self.h100.collective("collective-permute", 8, 1e9) is None
        assert sustained(find("tpu-v5e")).collective("all-gather", 8, 1e9) is None

    def test_a_cap_of_power_leaves_the_share_that_was_measured(self):
        assert sustained(find("a100-sxm4-80g")).capped(300) == pytest.approx(252.9 / 271.2)
        assert self.h100.capped(None) == self.h100.capped(1000) == 1

    def test_a_dtype_without_a_peak_is_refused(self):
        with pytest.raises(InputError, match="no published peak"):
            self.h100.product("float4", 4096)

    def test_a_curve_ascends(self):
        with pytest.raises(ValueError, match="ascend"):
            Sustained(products=[ProductRates(dtype="bfloat16", rates=((2.0, 1.0), (1.0, 1.0)), source="x")])
