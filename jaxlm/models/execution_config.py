"""The execution of a model's steps. Imports no JAX."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jaxlm.core.schema import InWords, Section
from jaxlm.models.quantize_config import Quantization, QuantizeKind

Dtype = Literal["float32", "bfloat16"]

# Norms, RoPE, attention, gated activations and the loss run as kernels of kernels_pallas wherever there is one for the
# chip, or as what XLA makes of plain JAX.
Kernels = Literal["auto", "xla"]

# How devices that share a sequence compute its attention (`jaxlm.models.doors.context_parallel`).
ContextParallel = Literal["auto", "gather", "heads", "ring"]

# How tokens reach the devices of their experts, where it is chosen (`jaxlm.models.expert_parallel`), and as it is asked
# for.
ExpertWay = Literal["gather", "all_to_all"]
ExpertParallel = Literal["auto", ExpertWay]


def _remat(value: Any) -> Any:
    listed = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    if value not in ("none", "full") and not listed:
        raise ValueError(f'{value!r} is neither "none" nor "full" nor a list of activations, such as ["query", "up"]')
    if listed and (twice := [name for name in dict.fromkeys(value) if list(value).count(name) > 1]):
        raise ValueError(f"{json.dumps(list(value))} lists {', '.join(twice)} twice")
    return value


# What a layer keeps for its backward pass: everything, only its input, or its input and the activations named
# (`ModelConfig.activations`).
Remat = Annotated[Literal["none", "full"] | tuple[str, ...], BeforeValidator(_remat)]


class ExecutionConfig(Section):
    """The execution of a model's steps. Its keys change speed and memory, and of results the rounding alone."""

    dtype: Dtype = "bfloat16"
    """The dtype of the forward and backward pass, of a cache, and of the gradients of one microbatch where devices sum
    them. In training, parameters, gradients summed over microbatches and optimizer state are float32."""
    kernels: Kernels = "auto"
    """Run the kernels of kernels_pallas on GPUs and TPUs ("auto"), or leave everything to XLA."""
    deterministic: bool = True
    """Let "auto" train with kernels alone whose gradients are bit-equal in each run. Without it attention on a GPU may
    be cuDNN's, where it was measured to be faster and the mask allows it, and Mosaic GPU's kernels add the gradient of
    a query in any order."""
    context_parallel: ContextParallel = "auto"
    """How the devices of `mesh.context` attend to one another's tokens: each gathers all keys and values ("gather"), or
    exchanges its tokens for heads ("heads", of which `mesh.context` has to divide those of a device), or keys and
    values travel around while blocks are computed ("ring"). "auto" takes a ring where blocks are large enough to hide
    it, and otherwise the way that sends fewer bytes."""
    pipeline_rounds: Annotated[int, Field(ge=1)] = 1
    """The chunks of layers that each stage of `mesh.pipeline` has. A microbatch goes around all stages as many times,
    which leaves them less idle: (S − 1) / (M R + S − 1) of S stages, M microbatches and R rounds. Stages then send R
    times as much and keep about (R + 1) / 2 times as many inputs, of shorter chunks; matrices move to their stages, and
    gradients back, once a step. More than 1 needs `training.microbatches` that `mesh.pipeline` divides."""
    pipeline_gather: Literal["tick", "step"] = "tick"
    """How often the matrices of layers on `mesh.pipeline` are gathered over the mesh axes that shard them where they
    are stored: each layer's in each tick, three times, or those of all layers of a device once a step, which sends far
    fewer bytes and keeps them whole. Gradients are reduced in each tick in both cases."""
    expert_parallel: ExpertParallel = "auto"
    """How tokens reach the devices of `mesh.expert` in training: each device gathers those of all others and adds up
    what their experts give ("gather"), or sends rows to the devices of their experts, at first up to 5 / 4 of an equal
    share to each, and what is left in further passes ("all_to_all"). "auto" takes what sends fewer bytes."""
    remat: Remat = "none"
    """What a layer keeps for its backward pass: everything ("none"), only its input ("full"), or its input and the
    activations named, such as ["query", "up"]."""
    scan_layers: bool | Literal["auto"] = "auto"
    """Compile equal layers of a training step once, in a loop, or write all layers out. "auto" writes them out on a GPU
    unless `remat` is "full", up to 48 layers, where the counted memory fits; on a CPU up to 12 layers that keep
    everything; on a TPU it is a loop."""
    quantize: Literal["none"] | QuantizeKind = "none"
    """Keep the matrices of layers and experts in this width, with float32 scales; fp8 is float8_e4m3fn, and mxfp4 four
    bits of floating point with a power of two as the scale of 32 inputs. w8a8 keeps what int8 does and the unembedding,
    and in each product rounds every row of activations to int8 too: faster on CPUs, and further from the model.
    Embeddings, the unembedding of other kinds, norms, biases and routers stay in `dtype`, and so do sums.

    In inference weights are rounded as they are read. Published ones that are stored in the form asked for are kept as
    they are; where nothing is asked for, so are those that are stored in any of these forms. In training it is for the
    weights that [lora] leaves as they are (QLoRA, arXiv:2305.14314), and needs that section; w8a8 is for inference
    alone."""
    quantize_group: Literal["auto", "all", 32, 64, 128] = "auto"
    """The inputs that share a scale of an output: all, or the largest of 32, 64 and 128 up to this number that divides
    the inputs of a matrix; a matrix whose inputs 32 does not divide stays in `dtype`. "auto" is 64 of int4, 32 of
    mxfp4 and all of the others; w8a8 and mxfp4 have no other."""
    quantize_targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Patterns of the paths of matrices that `quantize` is of, such as ["*/attention/*"]."""
    compiler_options: Annotated[dict[str, bool | int | float | str], InWords(type="table", default="none")] = Field(
        default_factory=dict
    )
    """Options of XLA's compiler for the programs of training, by their names in XLA_FLAGS without dashes, such as
    `xla_gpu_dot_merger_threshold_mb = 512`. They come beside those of jaxlm for the platform, and replace these."""

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.quantize == "w8a8" and self.quantize_group not in ("auto", "all"):
            raise ValueError(f'quantize_group = {self.quantize_group}: "w8a8" has one scale for all inputs; set "all"')
        if self.quantize == "mxfp4" and self.quantize_group not in ("auto", 32):
            raise ValueError(f'quantize_group = {self.quantize_group}: "mxfp4" has a scale for 32 inputs; set 32')
        return self

    @property
    def in_loop(self) -> bool:
        """True if equal layers run in a loop: also where "auto" is not resolved (`jaxlm.costs.layer_loops`), as in a
        recording and in inference, which does not read the key."""
        return self.scan_layers is not False

    @property
    def quantization(self) -> Quantization | None:
        """The form of the matrices of layers; None where they are in `dtype`."""
        if self.quantize == "none":
            return None
        match self.quantize_group:
            case "auto":
                group = {"int4": 64, "mxfp4": 32}.get(self.quantize, 0)
            case "all":
                group = 0
            case group:
                pass
        return Quantization(self.quantize, group, self.quantize_targets)


def keys_of(quantization: Quantization) -> dict[str, Any]:
    """Return the keys of `ExecutionConfig` for a form of the matrices of layers."""
    kind, group, targets = quantization
    return {"quantize": kind, "quantize_group": group or "all", "quantize_targets": list(targets)}
