"""The engine's step: what it reads is what one forward pass over the whole text does."""

import dataclasses
import re
from functools import partial

import forced_steps
import meshes
import model_fixtures
import numpy as np
import pytest
from markers import ELSEWHERE
from matrices import sampled

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import collectives, hlo, targets
from jaxlm.lowering.programs import step_programs
from jaxlm.models import tree
from kernels_pallas.core import interpreted
from kernels_pallas.paged_attention.costs import loop_name

# Each kind of layer, and of MIXED one again.
FAMILIES = {name: {**family, "num_layers": 2} for name, family in model_fixtures.FAMILIES.items()}
FAMILIES["mixed"] = {**model_fixtures.MIXED, "num_layers": 4}
# "mixed" reads chunks of prompts, and single tokens by kernels, below.
families = pytest.mark.parametrize(
    "family",
    sampled([pytest.param(family, id=name) for name, family in FAMILIES.items()], ["gpt2"]),
)
same = partial(model_fixtures.assert_same_numbers, relative=1e-5)


def parts(family, context):
    """Return a model, its parameters, and the logits after each token of three texts."""
    model = model_fixtures.model(family, context_length=context)
    (graph, _), parameters = tree.abstract(model), tree.init(model, 0, meshes.make())
    tokens = np.random.default_rng(0).integers(0, model_fixtures.VOCABULARY, (3, context), dtype=np.int32)
    return model, parameters, tokens, [model_fixtures.full_logits(graph, parameters, row, context) for row in tokens]


@families
def test_prompts_and_tokens_read_what_the_full_pass_does(family):
    """Prompts of different lengths in one step, then token by token."""
    model, parameters, tokens, expected = parts(family, 20)
    forced_steps.assert_reads_as_the_full_pass(model, parameters, tokens, [7, 1, 12], expected, same)


@pytest.mark.parametrize("family", sampled(["mistral", "mixed"], ["mixed"]))
def test_chunks_of_a_prompt_read_what_the_full_pass_does(family):
    """Chunks of several tiles, of one and of a part of one; windows end within pages, and across them."""
    model, parameters, tokens, expected = parts(FAMILIES[family], 128)
    steps = forced_steps.ForcedSteps(model, parameters, pages=4)
    for end in ([32, 32, 64], [70, 64, 96]):
        chunks = {i: tokens[i][steps.lengths[i] : end[i]] for i in range(3)}
        for i, logits in enumerate(steps.read(chunks)):
            same(logits, expected[i][end[i] - 1])


@pytest.mark.parametrize(
    ("name", "page", "length"),
    sampled([pytest.param("triton", 64, 60), pytest.param("mosaic_tpu", 128, 127)], ["triton-64-60"]),
)
def test_kernels_read_what_the_full_pass_does_whatever_is_beside_to_the_bit(name, page, length):
    """Chunks that end within pages, then single tokens, of layers with and without windows; together and alone."""
    model, parameters, tokens, expected = parts({**model_fixtures.MIXED, "num_layers": 3}, 160)
    settings = dataclasses.replace(
        forced_steps.SETTINGS, page=page
    )  # programs are kept by settings, and these are interpreted
    logits = []
    for beside in ([0, 1, 2], [1]):
        steps, mine = forced_steps.ForcedSteps(model, parameters, settings=settings), beside.index(1)
        with interpreted(name):
            for first in range(0, length - 32, 32):
                steps.read({i: tokens[i][first : first + 32] for i in beside})
            chunk = steps.read({i: tokens[i][first + 32 : length + i] for i in beside})
            token = steps.read({i: tokens[i][length + i : length + i + 1] for i in beside}, decodes=True)
        same(chunk[mine], expected[1][length])
        same(token[mine], expected[1][length + 1])
        logits.append((chunk[mine], token[mine]))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("sizes", sampled([(1, 8, 1), (1, 1, 8), (1, 2, 4), (2, 2, 2)], ["(2, 2, 2)"]), ids=str)
def test_a_step_sends_no_weights_and_no_pages(sizes):
    """Only activations of tokens move, whatever axes the mesh has."""
    model = model_fixtures.model(d_model=256, attention={"num_heads": 8}, vocab_size=512)
    experiment = model_fixtures.experiment(model, batch=8)
    mesh = meshes.make(*sizes)
    compiled = step_programs(experiment, "decode", mesh).step.compile()
    program = hlo.parse(compiled.as_text(), {loop_name(1, None): 1})
    smallest = 4 * model.d_model * model.attention.num_heads * model.attention.head_dim // mesh.size
    sent = collectives.collectives(program, dict(mesh.shape))
    assert all(c.bytes < smallest for c in sent), sent
    assert sent or mesh.shape["tensor"] == 1


@ELSEWHERE
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("family", ["llama", "latent"])
def test_shards_compile_for_tpus_with_kernels_on_each_device(family, kind):
    """XLA for TPUs aborts on a map over devices that is inside another, if a function that is called several times has
    it: from there it does not see the axes of the map around. So no function has a map of its own."""
    model = model_fixtures.model(model_fixtures.FAMILIES[family], d_model=256)
    experiment = model_fixtures.experiment(model, dtype="bfloat16", batch=4)
    mesh = meshes.make(1, 2, 2, devices=targets.devices(Target.parse("tpu-v5e:2x2")))
    lowered = step_programs(experiment, kind, mesh).step.lower()
    main, *others = re.split(r"(?m)^  func\.func ", lowered.as_text())[1:]
    assert main.count("sdy.manual_computation") > 1 + model.num_layers
    assert not [each for each in others if "sdy.manual_computation" in each]
    assert lowered.compile().as_text().count('custom_call_target="tpu_custom_call"') >= model.num_layers


@ELSEWHERE
def test_a_step_on_a_tpu_copies_no_weights():
    """By itself a TPU keeps a matrix [1024, 320] by its columns, which pads less; a lookup reads rows, and a kernel
    matrices of experts as they are declared."""
    mixture = model_fixtures.MIXTURE["feed_forward"] | {"d_ff": 192, "num_experts": 16}
    settings = model_fixtures.MIXTURE | {"feed_forward": mixture}
    model = model_fixtures.model(settings, d_model=320, vocab_size=1024, num_layers=2)
    experiment = model_fixtures.experiment(model, dtype="bfloat16", batch=4)
    mesh = meshes.make(1, 1, 1, devices=targets.devices(Target.parse("tpu-v5e:1")))
    program = step_programs(experiment, "decode", mesh).step.lower().compile().as_text()
    assert "parameters['" in program.replace("\\", "")
    copied = [line for line in program.replace("\\", "").splitlines() if " copy(" in line and "parameters['" in line]
    assert not copied
