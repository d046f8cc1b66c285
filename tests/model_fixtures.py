"""Small models, batches and settings."""

import functools

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
from flax import nnx
from pydantic import TypeAdapter

from jaxlm.config.experiment import Experiment
from jaxlm.core.schema import kind_of, sections_in
from jaxlm.inference.config import InferenceConfig
from jaxlm.models import tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.models.positions import packed_causal_mask
from jaxlm.parallel.batches import put_batch
from jaxlm.training.config import AnyOptimizer, OptimizerConfig, TrainingConfig
from jaxlm.training.step import TrainStep

VOCABULARY, CONTEXT = 64, 32

LLAMA = {
    "norm": {"kind": "rms"},
    "position": {"kind": "rope"},
    "attention": {"num_heads": 8, "num_kv_heads": 4},
    "feed_forward": {"d_ff": 48, "activation": "silu", "gated": True},
}
GPT2 = {
    "norm": {"kind": "layer", "bias": True},
    "position": {"kind": "learned"},
    "attention": {"num_heads": 8, "qkv_bias": True, "output_bias": True},
    "feed_forward": {"d_ff": 64, "activation": "gelu_tanh", "bias": True},
    "tied_embeddings": True,
}
QWEN3 = {
    **LLAMA,
    "attention": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 8, "qk_norm": "head"},
    "tied_embeddings": True,
}
MISTRAL = {**LLAMA, "attention": {"num_heads": 8, "num_kv_heads": 4, "window": 5}}
LLAMA31 = {
    **LLAMA,
    "position": {"kind": "rope", "scaling": {"factor": 8.0, "original_context_length": 16}},
}
# Gemma 2 and Gemma 3 combined; the second of three layers has global attention.
GEMMA = {
    **LLAMA,
    "norm": {"kind": "rms", "plus_one": True},
    "position": {"kind": "rope"},
    "attention": {
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
        "qk_norm": "head",
        "scale": 0.5,
        "soft_cap": 3.0,
    },
    "feed_forward": {"d_ff": 48, "activation": "gelu_tanh", "gated": True},
    "norm_placement": "both",
    "tied_embeddings": True,
    "embedding_scale": "sqrt_d_model",
    "logit_soft_cap": 4.0,
    "pattern": (
        {"name": "local", "position": {"theta": 100.0}, "attention": {"window": 5}},
        {"name": "global", "position": {"scaling": {"kind": "linear", "factor": 8.0}}},
    ),
}
# All sizes of attention differ, and so do values and keys.
LATENT = {
    **LLAMA,
    "attention": {
        "kind": "latent",
        "num_heads": 4,
        "query_rank": 20,
        "latent_rank": 24,
        "nope_dim": 16,
        "rope_dim": 8,
        "value_dim": 12,
    },
}

FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen3": QWEN3,
    "llama3.1": LLAMA31,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "latent": LATENT,
}

# A dense layer before mixtures, as DeepSeek-V3 has them, and sinks, as GPT-OSS has them.
MIXTURE = {
    **LLAMA,
    "attention": {**LLAMA["attention"], "sinks": True},
    "feed_forward": {
        "kind": "mixture",
        "num_experts": 8,
        "experts_per_token": 3,
        "d_ff": 16,
        "bias": True,
        "router": {"scores": "sigmoid", "scale": 2.0, "groups": {"count": 4, "kept": 2, "score": "top2_sum"}},
        "shared": {"d_ff": 16},
        "balance": {"auxiliary_loss": 0.2, "z_loss": 0.1},
    },
    "pattern": (
        {"name": "dense", "feed_forward": {"kind": "dense", "d_ff": 48}},
        {"name": "mixture", "layers": "rest"},
    ),
}

# Three kinds of layer, twice and two thirds: some are narrower and normalise their heads, some have a window and angles
# of their own, and some have no positions.
MIXED = {
    **LLAMA,
    "num_layers": 8,
    "pattern": (
        {"name": "small", "feed_forward": {"d_ff": 24}, "attention": {"qk_norm": "head"}},
        {"name": "local", "attention": {"window": 3}, "position": {"theta": 100.0}},
        {"name": "still", "position": {"kind": "none"}},
    ),
}

# Gated DeltaNet, whose keys and values have sizes of their own and where two value heads share a key; and Mamba-2.
DELTA = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 12}
MAMBA = {"kind": "mamba2", "num_heads": 4, "head_dim": 6, "state_dim": 8, "num_groups": 2, "bias": True}
# A hybrid of recurrence and attention, and a model of recurrences alone.
RECURRENT = {
    "delta": {**LLAMA, "num_layers": 2, "pattern": ({"name": "delta", "attention": DELTA}, {"name": "full"})},
    "mamba2": {
        **LLAMA,
        "num_layers": 2,
        "position": {"kind": "none"},
        "attention": MAMBA,
        "feed_forward": {"kind": "none"},
    },
}

# Where norms stand, and what the feed-forward layer reads.
BLOCKS = tuple(
    {"norm_placement": norm_placement, "residual": residual}
    for norm_placement in ("before", "after", "both")
    for residual in ("sequential", "parallel", "parallel_shared_norm")
    if (norm_placement, residual) != ("after", "parallel_shared_norm")
)


def model(family: dict = LLAMA, **changes) -> ModelConfig:
    """Return a model of three layers, width 32. Weights are ten times larger than usual, so that every term matters."""
    sizes = {
        "vocab_size": VOCABULARY,
        "context_length": CONTEXT,
        "num_layers": 3,
        "d_model": 32,
        "initializer_std": 0.2,
    }
    return ModelConfig(**{**sizes, **family, **changes})


def parameters(model: ModelConfig, seed: int = 0) -> dict:
    """Return parameters drawn by NumPy, which compiles nothing: matrices are normal, norms and biases as they begin."""
    draw = np.random.default_rng(seed)

    def drawn(path, leaf):
        if path[-1].key == "scale":
            return np.full(leaf.shape, 0.0 if getattr(model.norm, "plus_one", False) else 1.0, np.float32)
        if path[-1].key.endswith("bias"):
            return np.zeros(leaf.shape, np.float32)
        return model.initializer_std * draw.standard_normal(leaf.shape, np.float32)

    return jax.tree_util.tree_map_with_path(drawn, tree.shapes(tree.abstract(model)[1]))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of the last dimension, in NumPy: an oracle for models that are written out."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def silu(x: np.ndarray) -> np.ndarray:
    """Return x · σ(x), in NumPy."""
    return x / (1 + np.exp(-x))


def sections(**changes) -> tuple[ExecutionConfig, TrainingConfig]:
    """Return how a step of eight rows is executed, in float32, and what it trains, with changes of either."""
    execution = {key: changes.pop(key) for key in ExecutionConfig.model_fields.keys() & changes}
    training = {"batch": 8, "sequence": CONTEXT, **changes}
    return ExecutionConfig(**{"dtype": "float32", **execution}), TrainingConfig(**training)


def experiment(model: ModelConfig, optimization: OptimizerConfig | None = None, lora=None, **changes) -> Experiment:
    """Return the experiment of a model, with changes of `sections`; inference takes as many sequences as training."""
    execution, training = sections(**changes)
    return Experiment(
        model=model,
        execution=execution,
        training=training,
        optimizer=(optimization or _OPTIMIZATION).model_dump(),
        lora=lora,
        inference=InferenceConfig(sequences=training.batch, length=training.sequence, prompt=training.sequence),
    )


OPTIMIZERS = tuple(map(kind_of, sections_in(AnyOptimizer)))


def optimization(**changes) -> OptimizerConfig:
    """Return an optimizer configuration: AdamW unless a `kind` is given."""
    values = {"learning_rate": 1e-2, "schedule": {"decay_steps": 100}, **changes}
    return TypeAdapter(AnyOptimizer).validate_python(values)


def batch(rows: int = 8, length: int = CONTEXT, seed: int = 0, vocabulary: int = VOCABULARY) -> dict:
    """Return random rows, each packed with three segments and padded at its end."""
    draw = np.random.default_rng(seed)
    segments = np.zeros((rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    for row in range(rows):
        cuts = [0, *np.sort(draw.choice(np.arange(1, length), 3, replace=False))]
        for segment, (start, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True), start=1):
            segments[row, start:end] = segment
            positions[row, start:end] = np.arange(end - start)
        positions[row, cuts[-1] :] = np.arange(length - cuts[-1])
    tokens, targets = draw.integers(0, vocabulary, (2, rows, length), dtype=np.int32)
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}


_OPTIMIZATION = optimization()


def jitted(model, sections, mesh, optimization):
    """Return the jitted steps of an experiment, compiled at their first call."""
    return TrainStep(model, *sections, optimization).jitted(mesh)


def run_steps(model, sections, batches, mesh=None, optimization=None, initialised=False):
    """Run training steps from drawn `parameters`, or from those that a run initialises, which is a program more.
    Return (metrics of each step, final state)."""
    mesh = mesh or meshes.make()
    with jax.set_mesh(mesh):
        steps = jitted(model, sections, mesh, optimization or _OPTIMIZATION)
        state = steps.init() if initialised else steps.begin(placed(model, mesh))
        metrics = []
        for host in batches:
            state, measured = steps.train(state, put_batch(host, mesh))
            metrics.append(jax.device_get(measured))
        return metrics, jax.device_get(state)


def placed(model, mesh):
    """Return drawn parameters as they lie on a mesh."""
    return jax.device_put(parameters(model), tree.shardings(tree.abstract(model)[1], mesh))


def first_gradients(model, mesh, microbatches: int = 1, rows: dict | None = None, **changes):
    """Return the loss, other terms of layers, and all gradients of one step, through the step function itself: Adam's
    first moment after one update is (1 − β₁) × the gradient, and nothing is clipped. `changes` are of `sections`."""
    adam = optimization(clip_norm=1e9, beta1=0.5)
    (metrics,), state = run_steps(model, sections(microbatches=microbatches, **changes), [rows or batch()], mesh, adam)
    moments = state.optimizer[1][0].mu
    terms = {name: x for name, x in metrics.items() if name == "grad_norm" or name.endswith("loss")}
    return terms, jax.tree.map(lambda m: 2.0 * m, moments)


def assert_same_numbers(actual, expected, relative: float) -> None:
    """Assert that leaves are equal to a fraction `relative` of the largest absolute value of each leaf.

    Gradients are sums, whose small entries carry the rounding errors of large terms. A leaf that is zero up to
    rounding (a key bias does not change the softmax) is compared with a thousandth of the largest value of all leaves.
    """
    largest = max(np.abs(np.asarray(leaf)).max() for leaf in jax.tree.leaves(expected))

    def scaled(x, like):
        return np.asarray(x, np.float64) / max(np.abs(np.asarray(like, np.float64)).max(), 1e-3 * largest)

    chex.assert_trees_all_close(
        jax.tree.map(scaled, actual, expected), jax.tree.map(scaled, expected, expected), rtol=0, atol=relative
    )


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, parameters, tokens):
    module = nnx.merge(graph, parameters)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _, _ = module.hidden(tokens, positions, packed_causal_mask(positions))
    return module.logits(hidden)


def full_logits(graph, parameters, tokens, length=CONTEXT):
    """Return the logits [T, V] after each token of one sequence, from one forward pass.

    Sequences are padded to this length, which changes no logits before the padding, so that one program serves all.
    """
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(tokens)] = tokens
    return _logits(graph, parameters, padded)[0, : len(tokens)]
