"""The sections of an experiment that say how a model is trained. Imports no JAX."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxlm.core.schema import BelowOne, Count, CountFromZero, InWords, Kinds, NonNegative, Positive, Section, Share
from jaxlm.data.config import DataConfig
from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import ExecutionConfig
from jaxlm.models.lora_config import LoraConfig

DEFAULT_STEPS = 1000


class LocalSGDConfig(Section):
    """Replicas that train by themselves, one for each shard of `mesh.data`, with an outer optimizer over them (DiLoCo,
    Douillard et al. 2023, arXiv:2311.08105, algorithm 1). What is evaluated and exported are the outer parameters."""

    period: Count = 500
    """Steps of each replica between steps of the outer optimizer, of which one more comes after the last step."""
    outer_learning_rate: Positive = 0.7
    """Multiplies the outer optimizer's steps."""
    outer_momentum: BelowOne = 0.9
    """Decay of the outer optimizer's momentum, which is Nesterov's."""


class TrainingConfig(Section):
    """The optimizer's steps and what each of them learns from."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the parameters, the order of the text, dropout and the sample."""
    steps: Annotated[Count | None, InWords(default=f"{DEFAULT_STEPS}, or those of training.epochs")] = None
    """Optimizer steps of the whole run."""
    epochs: Positive | None = None
    """In place of `steps`: how often the rows of training text are read. It becomes a number of steps once the text is
    packed, rounded up, which the run records. Sources that are mixed by weight count together."""
    batch: Count = 16
    """Sequences per optimizer step over the whole job."""
    microbatches: Count = 1
    """Parts of a batch that are computed one after another to save memory; a divisor of `batch`."""
    sequence: Annotated[Count, InWords(default="model.context_length, at most 8192")]
    """Tokens per row."""
    dropout: BelowOne = 0.0
    """The probability that an activation is dropped in training. The numbers drawn depend on the size of `mesh.data`,
    and so do losses."""
    z_loss: NonNegative = 0.0
    """This times log² Z is added to each token's loss, to keep softmax's Z near 1 (Chowdhery et al. 2022,
    arXiv:2204.02311, section 5: 1e-4). The losses reported are without it."""
    ema_decay: Annotated[BelowOne, Field(gt=0.0)] | None = None
    """Decay per step of an exponential moving average of the parameters, which is kept if this is set."""
    local_sgd: LocalSGDConfig | None = None
    """Replicas over a slow network that exchange parameters now and then, in place of gradients in each step."""
    log_every: Count = 10
    """Steps between lines of metrics."""
    max_skipped_in_a_row: Count = 10
    """Steps in a row whose loss or gradient is not finite, and which are skipped, that end the run."""

    @model_validator(mode="before")
    @classmethod
    def _default_steps(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("steps") is None and values.get("epochs") is None:
            return {**values, "steps": DEFAULT_STEPS}
        return values

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("training.steps and training.epochs are both given; keep one")
        return self


class ScheduleConfig(Section):
    """The keys of every learning-rate schedule. Its steps are updates."""

    kind: str
    warmup_steps: CountFromZero = 0
    """Updates of the linear warm-up from 0 to the peak, `optimizer.learning_rate`."""


class DecayingScheduleConfig(ScheduleConfig):
    """The keys of every schedule that ends below its peak."""

    decay_steps: Annotated[Count | None, InWords(default="training.steps")] = None
    """The update at which the decay ends."""
    final_fraction: Share = 0.0
    """The learning rate at the end of the decay, relative to the peak."""


class CosineScheduleConfig(DecayingScheduleConfig):
    """Half a cosine from the peak to `final_fraction` of it (Loshchilov and Hutter 2017, arXiv:1608.03983,
    equation 5)."""

    kind: Literal["cosine"] = "cosine"
    final_fraction: Share = 0.1


class LinearScheduleConfig(DecayingScheduleConfig):
    """A line from the peak to `final_fraction` of it."""

    kind: Literal["linear"] = "linear"


class WarmupStableDecayScheduleConfig(DecayingScheduleConfig):
    """The peak, then a line to `final_fraction` of it (Hu et al. 2024, arXiv:2404.06395, section 4; the line and the
    share are those of Hägele et al. 2024, arXiv:2405.18392)."""

    kind: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The share of `decay_steps`, at their end, over which the learning rate decays."""


class ConstantScheduleConfig(ScheduleConfig):
    """The peak to the end."""

    kind: Literal["constant"] = "constant"


class ParameterGroupConfig(Section):
    """Settings of a group of parameters: `pattern = "embedding"` with `learning_rate_scale = 0.0` freezes them."""

    pattern: str
    """Selects the parameters whose path, such as "layers/attention/query", matches it; `*` matches any characters, `/`
    too."""
    learning_rate_scale: NonNegative = 1.0
    """Multiplies their learning rate; 0 freezes them, and their gradients do not count in the norm."""
    weight_decay: NonNegative | None = None
    """Takes the place of the optimizer's weight decay, for gains and biases too."""


class OptimizerConfig(Section):
    """The keys of every optimizer."""

    kind: str
    learning_rate: Positive = 3e-4
    """The peak of the schedule."""
    schedule: Kinds(CosineScheduleConfig, LinearScheduleConfig, WarmupStableDecayScheduleConfig, ConstantScheduleConfig)
    weight_decay: NonNegative = 0.1
    """Decay of matrices: one update is p ← p − rate · (direction + weight_decay · p). Other parameters have none."""
    clip_norm: Positive = 1.0
    """The largest global norm of the gradients, to which larger ones are scaled."""
    groups: tuple[ParameterGroupConfig, ...] = ()
    """Groups of parameters with settings of their own; a parameter belongs to the first that matches it."""


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    beta1: BelowOne = 0.9
    """Decay of the first moment."""
    beta2: BelowOne = 0.95
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the root of the second moment."""


class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices inside the layers; AdamW with
    `beta1`, `beta2` and `epsilon` for embeddings, unembedding, gains and biases.

    The update of a matrix, per layer and of the whole matrix [inputs, outputs] with the heads of a projection
    together, is orthogonal by `iterations` of Newton and Schulz, times 0.2 · √max(inputs, outputs): the root mean
    square of AdamW's, so that its learning rate and weight decay carry over (Liu et al. 2025, arXiv:2502.16982,
    equation 4).
    """

    kind: Literal["muon"] = "muon"
    momentum: BelowOne = 0.95
    """Decay of the momentum of matrices."""
    nesterov: bool = True
    """Look ahead with the momentum."""
    iterations: Annotated[int, Field(gt=0, le=100)] = 5
    """Iterations of Newton and Schulz."""
    adam_learning_rate: Annotated[Positive | None, InWords(default="optimizer.learning_rate")] = None
    """The peak of the learning rate for AdamW's parameters."""
    beta1: BelowOne = 0.9
    """Decay of AdamW's first moment."""
    beta2: BelowOne = 0.95
    """Decay of AdamW's second moment."""
    epsilon: Positive = 1e-8
    """Added to the root of AdamW's second moment."""


class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5), without momentum."""

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: Positive = 1e-2
    """The peak of the schedule, relative to the root mean square of a parameter (at least 1e-3)."""
    weight_decay: NonNegative = 0.0
    decay_exponent: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """The second moment of update t is averaged with decay 1 − t^−`decay_exponent`."""
    update_clip: Positive = 1.0
    """The largest root mean square of an update, to which larger ones are scaled."""


class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2); its section 5 asks for a learning rate 3 to 10 times
    below AdamW's, and a weight decay as much above."""

    kind: Literal["lion"] = "lion"
    learning_rate: Positive = 1e-4
    weight_decay: NonNegative = 0.3
    beta1: BelowOne = 0.9
    """Weight of the momentum in an update."""
    beta2: BelowOne = 0.99
    """Decay of the momentum."""


class SGDConfig(OptimizerConfig):
    """Gradient descent with momentum (Sutskever et al. 2013, equations 1 to 4)."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: Positive = 0.1
    weight_decay: NonNegative = 0.0
    momentum: BelowOne = 0.9
    """Decay of the momentum."""
    nesterov: bool = False
    """Look ahead with the momentum."""


class ObjectiveConfig(Section):
    """A section from which the objective of training on text, or on answers, is made."""

    kind: str


class NextTokenConfig(ObjectiveConfig):
    """The cross-entropy of the next token, with `training.z_loss`. Preferences have `[dpo]` in its place."""

    kind: Literal["next_token"] = "next_token"


class DPOConfig(Section):
    """Direct preference optimisation, the objective of `data.preferences` (Rafailov et al. 2023, arXiv:2305.18290,
    equation 7): answers are held against the model that training began with."""

    beta: Positive = 0.1
    """The weight of the log-probabilities relative to that model's: the larger, the closer to it."""


OBJECTIVES = Kinds(NextTokenConfig)
AnyOptimizer = Kinds(AdamWConfig, MuonConfig, AdafactorConfig, LionConfig, SGDConfig)


class EvaluationConfig(Section):
    """The loss on held-out text: during training on some rows, at its end on more."""

    every: Count = 500
    """Steps between evaluations."""
    batches: Count = 20
    """Batches of each source in an evaluation, always the same rows, drawn from all of them."""
    final_tokens: Count = 10_000_000
    """Held-out tokens of each source in the evaluation at the end, in whole batches; a source with fewer is measured
    on all of them."""


class RecordsConfig(Section):
    """Records in addition to metrics.jsonl and evaluations.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: Annotated[str, Field(min_length=1)] | None = None
    """The project of a Weights & Biases run, which is made if this is set."""
    norms_every: Count | None = None
    """Steps between records of the norms of each layer, which are made if this is set."""
    sample_tokens: CountFromZero = 200
    """The most tokens of the sample that is drawn when the run is over; 0 draws none."""


class CheckpointConfig(Section):
    """Checkpoints, one of them at the end."""

    every: Count = 500
    """Steps between checkpoints."""
    keep: Count = 2
    """The newest checkpoints that stay; so does the one with the lowest held-out loss, among those at whose step
    `evaluation.every` let it be measured."""
    memory_every: Count | None = None
    """Steps between copies of the state in the memory of its hosts, which are made if this is set. They outlive the
    processes: a run whose processes were lost resumes from the newest, if no checkpoint is newer. Each part of the
    state is on two hosts, and a host keeps the parts of the last two copies."""
    memory_folder: Annotated[str, Field(min_length=1)] = "/dev/shm"
    """The folder of these copies, of a file system in memory on each host."""


class RunConfig(Section):
    """One training run: what it trains, on what, how, and what it keeps."""

    model: ModelConfig
    execution: ExecutionConfig = Field(default_factory=ExecutionConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig
    optimizer: AnyOptimizer
    objective: OBJECTIVES = NextTokenConfig()  # pyright: ignore[reportInvalidTypeForm]
    dpo: DPOConfig | None = None
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    records: RecordsConfig = Field(default_factory=RecordsConfig)
    lora: LoraConfig | None = None
