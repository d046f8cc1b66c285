"""How a model is trained. Imports no JAX."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxlm.models.config import Remat
from jaxlm.schema import Section

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class TrainingConfig(Section):
    """The optimizer's steps and how each is computed.

    `batch` is sequences per optimizer step over the whole job; `microbatches` divides it. `sequence` is tokens
    per row (by default the model's context). `dtype` is that of the forward and backward pass; parameters,
    gradients' sums and optimizer state are float32. `remat` is what a layer keeps for its backward pass:
    everything, only its input, or the activations named. A step whose loss or gradient is not finite is skipped;
    `max_skipped_in_a_row` of them end the run.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    steps: PositiveInt = 1000
    batch: PositiveInt = 16
    microbatches: PositiveInt = 1
    sequence: PositiveInt
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Remat = "none"
    scan_layers: bool = True
    dropout: Fraction = 0.0
    log_every: PositiveInt = 10
    max_skipped_in_a_row: PositiveInt = 10


class CosineSchedule(Section):
    """Linear warmup from 0, then half a cosine from the peak to `final_fraction` of it at
    `decay_steps` (by default `training.steps`)."""

    kind: Literal["cosine"] = "cosine"
    decay_steps: PositiveInt
    warmup_steps: NonNegativeInt = 0
    final_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1


class AdamWConfig(Section):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); `weight_decay` acts on matrices only."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 3e-4
    schedule: CosineSchedule
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat = 1.0


class EvaluationConfig(Section):
    """Held-out loss every `every` steps over `batches` batches; at the end over all of the held-out text."""

    every: PositiveInt = 500
    batches: PositiveInt = 20


class RecordsConfig(Section):
    """What is recorded besides metrics.jsonl and evaluations.jsonl: TensorBoard event files in RUN/tensorboard, a
    Weights & Biases run in this project, and every `norms_every` steps the norms of each layer."""

    tensorboard: bool = True
    wandb_project: str | None = None
    norms_every: PositiveInt | None = None


class CheckpointConfig(Section):
    """A checkpoint every `every` steps and at the end; the newest `keep` and the best stay."""

    every: PositiveInt = 500
    keep: PositiveInt = 2
