"""The expected time of steps with quantised matrices."""

from pathlib import Path

import pytest

from jaxlm import api

LLAMA = Path(__file__).parents[2] / "configs" / "models" / "llama3.1-8b.toml"


@pytest.mark.parametrize("chip", ["h100-sxm5:1", "tpu-v6e:1x1"])
def test_fewer_bits_take_less_time_as_products_and_not_as_attention(chip):
    """A kernel's product with a quantised matrix is rated as a product with weights."""
    plans = {}
    for form in ("none", "int8", "int4"):
        settings = ["inference.sequences=4", "inference.length=512", f"execution.quantize={form}"]
        plans[form] = api.plan(api.configure(LLAMA, settings), chip, workload="decode").best
    none, int8, int4 = (plan.time for plan in plans.values())
    assert int4.expected < int8.expected < none.expected and int8.lower_bound < 0.7 * none.lower_bound
    attention = {form: plan.time.parts["attention"].seconds for form, plan in plans.items()}
    assert attention["int8"] == pytest.approx(attention["none"])
    assert int8.parts["products"].seconds < none.parts["products"].seconds


def test_products_of_integers_have_their_rate_where_a_chip_has_one():
    """Many rows: 16,384 tokens of a prompt. A B300 multiplies int8 slower than bfloat16."""
    settings = ["inference.sequences=8", "inference.length=2048"]
    for chip, faster in (("tpu-v6e:1x1", 0.7), ("b300-hgx:1", 1.0)):
        int8, w8a8 = (
            api.plan(api.configure(LLAMA, [*settings, f"execution.quantize={form}"]), chip, workload="prefill").best
            for form in ("int8", "w8a8")
        )
        # The unembedding of 128,256 ids is in int8 too, with a scale for each.
        assert int8.memory.parameters - w8a8.memory.parameters == 128_256 * (4096 - 4)
        assert (w8a8.time.compute < faster * int8.time.compute) == (faster < 1)
