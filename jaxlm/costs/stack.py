"""The software that runs a step, as far as the step's time and memory depend on it.

A plan is of jaxlm's own programs unless another stack is given: a published run is counted as it was run, and
`jaxlm plan --stack` says what the same step costs under other software.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, ValidationError, model_validator

from jaxlm.core.errors import InputError
from jaxlm.core.explain import message_of
from jaxlm.core.schema import Section, merged
from jaxlm.costs.hardware.sustained import attention_kernels

_BYTES = {"float8": 1.0, "int8": 1.0, "float4": 0.5, "int4": 0.5}


class Pipeline(Section):
    """Layers cut into stages, between which microbatches pass.

    Bubbles in closed form, for p stages, m microbatches and v chunks of layers a stage: `1f1b` and `gpipe` wait
    (p − 1) / (v m) of the ideal time (Narayanan et al. 2021, arXiv:2104.04473, section 2.2); `zb1p` a third of that,
    `zbv` none (Qi et al. 2024, arXiv:2401.10241).
    """

    stages: PositiveInt = 1
    chunks: PositiveInt = 1
    schedule: Literal["1f1b", "gpipe", "zb1p", "zbv"] = "1f1b"

    def bubble(self, microbatches: int) -> float:
        """Return the time that a stage waits, as a share of the time that it computes."""
        share = {"1f1b": 1.0, "gpipe": 1.0, "zb1p": 1 / 3, "zbv": 0.0}[self.schedule]
        return share * (self.stages - 1) / (self.chunks * microbatches)


class Stack(Section):
    """The software of a step.

    `attention`: the kernel, by its name in sustained.toml ("cudnn", "flash-1", "flash-2", "flash-3", "splash", …);
    "unfused" moves scores through memory; None is the kernel that jaxlm runs on the chip. `passes`: "fused" as XLA and
    compiled frameworks fuse work between products; "eager" runs each operation as a kernel of its own. `overlap`:
    "dependence" hides a collective behind all computation that does not wait for it; "none" hides no collective.
    `layers`: "auto" runs them as `execution.scan_layers` says, in a loop or written out; "unrolled" never in a loop.
    `launch`: "graph" starts one program or captured graph a step; "eager" starts each operation from the host.
    `gradient_dtype`: of the gradients that devices sum; None: as jaxlm sends them. `state_bytes`: bytes of memory per
    parameter for its copies, its gradient and the optimizer's state; None: as jaxlm keeps them. `precision`: the dtype
    of the products with weights, where it is narrower than the step's. `cache`: that of the keys and values of an
    engine, likewise. `pages`: attention reads them through a table of pages, at the rates measured of such kernels;
    otherwise as one array, at the rates of a product with one row. `all_reduce`: of small arrays between GPUs, by NCCL
    or by a serving engine's own kernel. `watts`: the power at which chips were capped.
    """

    attention: str | None = None
    passes: Literal["fused", "eager"] = "fused"
    overlap: Literal["dependence", "none"] = "dependence"
    layers: Literal["auto", "unrolled"] = "auto"
    launch: Literal["graph", "eager"] = "graph"
    gradient_dtype: Literal["float32"] | None = None
    state_bytes: PositiveFloat | None = None
    precision: Literal["float8", "float4", "int8", "int4"] | None = None
    cache: Literal["float8", "int8"] | None = None
    pages: bool = True
    all_reduce: Literal["nccl", "custom"] = "nccl"
    watts: PositiveFloat | None = None
    pipeline: Pipeline = Pipeline()

    def changes(self) -> dict[str, Any]:
        """Return the keys, with dots, whose values are not those of jaxlm's own programs."""
        changed = self.model_dump(exclude_defaults=True)
        stages = changed.pop("pipeline", {})
        return changed | {f"pipeline.{key}": value for key, value in stages.items()}

    @model_validator(mode="after")
    def _one_process_has_no_pipeline(self):
        if self.pipeline.chunks > 1 and self.pipeline.stages == 1:
            raise ValueError("chunks of a pipeline need stages: set pipeline.stages")
        return self

    def weight_bytes(self, itemsize: int) -> float:
        """Return the bytes of a weight of inference, which has `itemsize` bytes in the step's dtype."""
        return itemsize if self.precision is None else _BYTES[self.precision]

    def cache_share(self, itemsize: int) -> float:
        """Return the size of an engine's cache, as a share of that in the step's dtype of `itemsize` bytes."""
        return 1.0 if self.cache is None else _BYTES[self.cache] / itemsize


JAXLM = Stack()

# Stacks by name: the software of published runs. What each does is said in its own documentation; a kernel's era is
# that of the run, and a case may name another.
STACKS: dict[str, Stack] = {
    "jaxlm": JAXLM,
    "maxtext": Stack(),
    "torch-fsdp": Stack(
        attention="flash-2", passes="eager", overlap="none", layers="unrolled", gradient_dtype="float32"
    ),
    "torch-compile": Stack(attention="flash-2", overlap="none", layers="unrolled", gradient_dtype="float32"),
    "megatron": Stack(attention="cudnn", layers="unrolled", gradient_dtype="float32", state_bytes=18),
    "gpt-fast": Stack(attention="flash-2", pages=False, all_reduce="custom"),
    "vllm": Stack(attention="flash-3", all_reduce="custom"),
}


def stack_of(name: str | None = None, changes: Mapping[str, Any] | None = None) -> Stack:
    """Return the stack of a name, jaxlm's own for None, with other values of its keys.

    Raises InputError for an unknown name or key, naming the nearest, and for a value that a key does not take.
    """
    if name is not None and name not in STACKS:
        raise InputError(f"there is no stack {name!r}; {_nearest(name, STACKS)}")
    base = STACKS[name or "jaxlm"]
    try:
        stack = Stack.model_validate(merged(base.model_dump(), dict(changes or {})))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = [*Stack.model_fields, *(f"pipeline.{each}" for each in Pipeline.model_fields)]
            raise InputError(f"{key!r} is no key of a stack; {_nearest(key, known)}") from None
        raise InputError(f"{key or 'pipeline'} of a stack: {message_of(first)}") from None
    kernels = [*attention_kernels(), "unfused"]
    if stack.attention is not None and stack.attention not in kernels:
        raise InputError(f"there is no attention kernel {stack.attention!r}; {_nearest(stack.attention, kernels)}")
    return stack


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def stack_from(values: Mapping[str, Any]) -> Stack:
    """Return the stack of a table of a file: keys of a stack, and the name of the one that it is `like`."""
    return stack_of(values.get("like"), {key: value for key, value in values.items() if key != "like"})
