"""The bytes of a training step on a GPU: what a loop over layers stacks for its backward pass, and those of kernels."""

import json
from collections import Counter
from pathlib import Path

import jax
import pytest

from jaxlm import config as configuration
from jaxlm.costs.counted.recorder import constants_and_carried
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.programs import step_programs
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.mesh import make_mesh

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES = json.loads((BENCHMARKS / "results" / "compiled" / "step_bytes.json").read_text())["cases"]
LAYERS, BATCH, T, D, F, HEADS = 3, 16, 1024, 1024, 4096, (16, 64)


def step(*overrides):
    """Return the training step of a GPT-2 355M of few layers on an H100, as a program that is not compiled yet."""
    path = "gpt2-355m"
    sizes = f"training.batch={BATCH}", f"training.sequence={T}", f"model.num_layers={LAYERS}"
    experiment = configuration.load(path, [*sizes, *overrides])
    mesh = make_mesh(Layout(), targets.devices(Target.parse("h100-sxm5")))
    return step_programs(experiment, "train", mesh).step


def loops(jaxpr):
    """Yield the scans over layers of a jaxpr, forward and backward."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] == LAYERS:
            yield eqn
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from loops(inner)


@pytest.fixture(scope="module")
def stacked():
    """Return the shapes that the forward loop stacks, [layers, …] each, and how often."""
    forward, backward = loops(step("model.vocab_size=512").trace().jaxpr.jaxpr)
    assert not forward.params["reverse"] and backward.params["reverse"]
    return Counter(x.aval.shape[1:] for x in forward.outvars[constants_and_carried(forward.params)[1] :])


def test_no_weight_is_stacked_again(stacked):
    """The backward pass reads those that the loop takes slices of."""
    assert all(shape[:1] == (BATCH,) or shape[:1] == (BATCH * T,) for shape in stacked)


def test_attention_s_result_is_stacked_in_one_shape(stacked):
    """Queries, keys, values and the result, which XLA merges with what the product reads."""
    assert stacked[BATCH, T, *HEADS] == 5
    of_norms, hidden = (stacked[BATCH * T, width] + stacked[BATCH, T, width] for width in (D, F))
    assert (of_norms, hidden) == (4, 2)  # operand and result of two norms, and of the activation
    assert stacked.total() == 5 + 4 + 2 + 1  # and the log-sum-exp


def test_the_activation_keeps_what_its_product_wrote():
    """The pre-activation without its bias, whose kernel adds it: no pass writes a slope."""
    jaxpr = str(step("model.vocab_size=512").trace().jaxpr)
    assert "bias_activation_backward" in jaxpr


# GB of a step of GPT-2 355M, 16 × 1,024, as JAX 0.10.2 compiles it.
MOST = {"gpt2-355m, written out": 138, "gpt2-355m, loop, named remat": 187}


@pytest.mark.parametrize("name", MOST)
def test_the_recorded_step_moves_few_bytes(name):
    assert CASES[name]["by_few"]["bytes"] < MOST[name] * 1e9


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MOST)
def test_a_compiled_step_moves_few_bytes(name, monkeypatch):
    """Two numbers of layers give the bytes of one, which are those of all."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_bytes

    found = step_bytes.few_layers(step_bytes.CASES[name])
    assert found["by_few"]["bytes"] < MOST[name] * 1e9
