"""The sections of an experiment that say how a model is trained. Imports no JAX."""

from typing import Annotated, Literal

from pydantic import Field

from jaxlm.core.schema import Count, CountFromZero, Fraction, Kinds, NonNegative, Positive, Section
from jaxlm.data.config import DataConfig
from jaxlm.models.config import Kernels, ModelConfig, Remat

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class TrainingConfig(Section):
    """The optimizer's steps and how each is computed.

    `batch` is sequences per optimizer step over the whole job; `microbatches` divides it. `sequence` is tokens per row
    (by default the model's context, at most 8,192). `dtype` is that of the forward and backward pass, and of the
    gradients of one microbatch where devices sum them; parameters, gradients summed over microbatches and optimizer
    state are float32.

    `remat`, `scan_layers` and `kernels` change no result beyond rounding. `remat` is what a layer keeps for its
    backward pass: everything, only its input, or the activations named. `kernels = "auto"` runs the kernels of
    kernels_pallas on GPUs and TPUs; "xla" leaves all of them to XLA.

    `z_loss` times log² Z is added to each token's loss, to keep softmax's Z near 1 (Chowdhery et al. 2022,
    arXiv:2204.02311, section 5: 1e-4); the losses reported are without it. The numbers that `dropout` drops depend on
    the size of the `data` axis, and so do losses with it. `ema_decay` keeps an exponential moving average of the
    parameters. A step whose loss or gradient is not finite is skipped; `max_skipped_in_a_row` of them end the run.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    steps: Count = 1000
    batch: Count = 16
    microbatches: Count = 1
    sequence: Count
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Remat = "none"
    scan_layers: bool = True
    kernels: Kernels = "auto"
    dropout: Fraction = 0.0
    z_loss: NonNegative = 0.0
    ema_decay: Annotated[Fraction, Field(gt=0.0)] | None = None
    log_every: Count = 10
    max_skipped_in_a_row: Count = 10


class ScheduleConfig(Section):
    """The keys of every learning-rate schedule. Its steps are updates; it starts with a linear warm-up over
    `warmup_steps` from 0 to the peak, `optimizer.learning_rate`."""

    kind: str
    warmup_steps: CountFromZero = 0


class CosineScheduleConfig(ScheduleConfig):
    """Half a cosine from the peak to `final_fraction` of it at `decay_steps` (by default `training.steps`;
    Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5)."""

    kind: Literal["cosine"] = "cosine"
    decay_steps: Count
    final_fraction: Share = 0.1


class LinearScheduleConfig(ScheduleConfig):
    """A line from the peak to `final_fraction` of it at `decay_steps` (by default `training.steps`)."""

    kind: Literal["linear"] = "linear"
    decay_steps: Count
    final_fraction: Share = 0.0


class WarmupStableDecayScheduleConfig(ScheduleConfig):
    """The peak, then over the last `decay_fraction` of `decay_steps` a line to `final_fraction` of the peak at
    `decay_steps` (by default `training.steps`; Hu et al. 2024, arXiv:2404.06395, section 4; the line and the share are
    those of Hägele et al. 2024, arXiv:2405.18392)."""

    kind: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    decay_steps: Count
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    final_fraction: Share = 0.0


class ConstantScheduleConfig(ScheduleConfig):
    """The peak to the end."""

    kind: Literal["constant"] = "constant"


class ParameterGroupConfig(Section):
    """Settings of the parameters whose path, such as "layers/attention/query", matches `pattern` (`*` matches any
    characters, `/` too).

    Their learning rate is multiplied by `learning_rate_scale`; 0 freezes them, and their gradients do not count in
    the norm. `weight_decay` takes the place of the optimizer's, for gains and biases too.
    """

    pattern: str
    learning_rate_scale: NonNegative = 1.0
    weight_decay: NonNegative | None = None


class OptimizerConfig(Section):
    """The keys of every optimizer. One update is p ← p − rate · (direction + weight_decay · p), the direction from
    gradients clipped to the global norm `clip_norm`; `weight_decay` acts on matrices only. Of `groups`, a parameter
    belongs to the first whose pattern matches it.
    """

    kind: str
    learning_rate: Positive = 3e-4
    schedule: Kinds(CosineScheduleConfig, LinearScheduleConfig, WarmupStableDecayScheduleConfig, ConstantScheduleConfig)
    weight_decay: NonNegative = 0.1
    clip_norm: Positive = 1.0
    groups: tuple[ParameterGroupConfig, ...] = ()


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Positive = 1e-8


class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices inside the layers; AdamW with
    `beta1`, `beta2` and `epsilon` for embeddings, unembedding, gains and biases.

    The update of a matrix, per layer and of the whole matrix [inputs, outputs] with the heads of a projection
    together, is orthogonal by `iterations` of Newton and Schulz, times 0.2 · √max(inputs, outputs): the root mean
    square of AdamW's, so that its learning rate and weight decay carry over (Liu et al. 2025, arXiv:2502.16982,
    equation 4). `adam_learning_rate` is by default `learning_rate`.
    """

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    nesterov: bool = True
    iterations: Annotated[int, Field(gt=0, le=100)] = 5
    adam_learning_rate: Positive | None = None
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Positive = 1e-8


class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5), without momentum.

    `learning_rate` is relative to the root mean square of a parameter (at least 1e-3). The second moment is averaged
    with decay 1 − t^−`decay_exponent`; an update's root mean square is at most `update_clip`.
    """

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: Positive = 1e-2
    weight_decay: NonNegative = 0.0
    decay_exponent: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    update_clip: Positive = 1.0


class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2); its section 5 asks for a learning rate 3 to 10 times
    below AdamW's, and a weight decay as much above."""

    kind: Literal["lion"] = "lion"
    learning_rate: Positive = 1e-4
    weight_decay: NonNegative = 0.3
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99


class SGDConfig(OptimizerConfig):
    """Gradient descent with momentum (Sutskever et al. 2013, equations 1 to 4), `nesterov` looking ahead."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: Positive = 0.1
    weight_decay: NonNegative = 0.0
    momentum: Fraction = 0.9
    nesterov: bool = False


AnyOptimizer = Kinds(AdamWConfig, MuonConfig, AdafactorConfig, LionConfig, SGDConfig)


class EvaluationConfig(Section):
    """Held-out loss every `every` steps over `batches` batches of each source, always the same rows, drawn from all of
    them; at the end over all of the held-out text."""

    every: Count = 500
    batches: Count = 20


class RecordsConfig(Section):
    """Records in addition to metrics.jsonl and evaluations.jsonl: TensorBoard event files, a Weights & Biases run in
    this project, and every `norms_every` steps the norms of each layer."""

    tensorboard: bool = True
    wandb_project: Annotated[str, Field(min_length=1)] | None = None
    norms_every: Count | None = None


class CheckpointConfig(Section):
    """A checkpoint every `every` steps and at the end; the newest `keep` stay, and the one with the lowest
    held-out loss among those at whose step `evaluation.every` let it be measured."""

    every: Count = 500
    keep: Count = 2


class RunConfig(Section):
    """One training run: what it trains, on what, how, and what it keeps."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig
    optimizer: AnyOptimizer
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    records: RecordsConfig = Field(default_factory=RecordsConfig)
