"""The cost of a step on chips that need not be here: FLOPs, memory, time, money and energy."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxlm.config import mesh_layout
from jaxlm.core.errors import InputError
from jaxlm.costs.counted.cache import kv_bytes_per_token, kv_cache, page_layout, state_bytes_per_sequence
from jaxlm.costs.counted.device import replicated_kv_heads
from jaxlm.costs.counted.flops import Flops, active_share, expert_rows, flops
from jaxlm.costs.counted.memory import Memory
from jaxlm.costs.counted.traffic import OUTER, collectives
from jaxlm.costs.draft_steps import draft_reading
from jaxlm.costs.hardware.chip_changes import given_figures
from jaxlm.costs.hardware.chips import Chip
from jaxlm.costs.hardware.network import Network
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.layer_loops import LayerChoice, choose
from jaxlm.costs.napkin import Napkin, napkin
from jaxlm.costs.stack import JAXLM, Stack
from jaxlm.costs.stack_memory import stack_memory
from jaxlm.costs.timing.step_time import StepTime, step_time
from jaxlm.costs.workload import Workload
from jaxlm.parallel.layout import over_slices

# The share of a device's memory that a plan had better leave free. The count is within 5 % of the compiler's own, or
# above it, in nine of ten compiled programs, and 18 % below it at worst (docs/memory.md). The driver, the CUDA context
# and NCCL's buffers, which are not counted, take memory of a GPU as well.
HEADROOM = 0.1

# Vocabularies of one tokenizer differ by how far each model pads its tables.
_PADDING = 1024


@dataclass(frozen=True)
class Plan:
    """A workload on a target. Rates and prices are at the expected time of the step. `layers`: in training, whether
    they run in a loop. `stack`: the software of the step."""

    work: Workload
    target: Target
    flops: Flops
    memory: Memory
    time: StepTime
    layers: LayerChoice | None = None
    stack: Stack = JAXLM

    @property
    def capacity(self) -> int:
        return self.target.chip.device_capacity()

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    @property
    def leaves_headroom(self) -> bool:
        """True if the plan leaves `HEADROOM` of a device's memory free."""
        return self.memory.total <= (1 - HEADROOM) * self.capacity

    @property
    def napkin(self) -> Napkin:
        return napkin(self.work, self.target)

    @property
    def tokens_per_s(self) -> float:
        return self.work.tokens * self.work.tokens_per_sequence / self.time.expected

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: model FLOPs (attention counted whole) per second, as a share of the peak in the
        workload's dtype."""
        return mfu(self.flops.model, self.time.expected, self.target.chip, self.target.chips, self.work.dtype)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The price of a million tokens at the geometric mean of the chip's prices; None if no price is published."""
        return self._usd_per_s and self._usd_per_s / self.tokens_per_s * 1e6

    @property
    def run_s(self) -> float | None:
        """Seconds of all steps of a training run, or of the one step of inference; None if its steps are not known."""
        return self.work.steps and self.work.steps * self.time.expected

    @property
    def usd_per_run(self) -> float | None:
        """The price of `run_s`; None if no price is published, or its steps are not known."""
        return self._usd_per_s and self.run_s and self._usd_per_s * self.run_s

    @property
    def _usd_per_s(self) -> float | None:
        price = self.target.chip.usd_per_hour
        return price and math.sqrt(price[0] * price[1]) * self.target.chips / 3600

    @property
    def joules_per_token(self) -> float | None:
        """Energy at the chips' rated power; None if the rated power is not published."""
        watts = self.target.chip.watts
        return watts and watts * self.target.chips / self.tokens_per_s

    def row(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        time, first = self.time, self.napkin
        return {
            "chips": self.target.chips,
            "devices": self.target.devices,
            "target": str(self.target),
            "chip": given_figures(self.target.chip),
            "workload": self.work.kind,
            "mesh": dict(self.work.layout),
            **({"stack": changes} if (changes := self.stack.changes()) else {}),
            "batch": self.work.batch,
            "sequence": self.work.sequence,
            "microbatches": self.work.microbatches,
            "remat": self.work.remat,
            **self._of_stages(),
            "replicated_kv_heads": bool(replicated_kv_heads(self.work)),
            "parameters": parameter_counts(self.work),
            "napkin": {**first._asdict(), "tokens_per_s": first.step_s and self.work.tokens / first.step_s},
            "flops": self.flops._asdict(),
            **({"expert_rows": rows._asdict()} if (rows := expert_rows(self.work)) else {}),
            "memory_bytes_per_device": {**self.memory._asdict(), "total": self.memory.total, "capacity": self.capacity},
            "fits": self.fits,
            "leaves_headroom": self.leaves_headroom,
            "time_s": {
                "compute": time.compute,
                "memory": time.memory,
                "collectives": time.collectives,
                "lower_bound": time.lower_bound,
                "low": time.low,
                "expected": time.expected,
                "upper_bound": time.upper_bound,
                "parts": {name: part.seconds for name, part in time.parts.items()},
            },
            "gap": [reason._asdict() for reason in time.reasons],
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "bound_by": time.bound_by,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "joules_per_token": self.joules_per_token,
            **self._of_its_kind(),
        }

    def _of_stages(self) -> dict[str, Any]:
        """Return the stages of a pipeline as JSON, under `stages`: the share of idle passes among all, the slots of a
        chunk and those that have no layer, how often matrices are gathered, and the inputs that each stage keeps; empty
        without one."""
        if (work := self.work).stages == 1:
            return {}
        ticks, staged = work.ticks, work.stage_layers
        sizes = {"count": work.stages, "rounds": work.rounds, "slots": staged.slots, "idle_slots": staged.idle}
        sizes |= {"gather": work.execution.pipeline_gather}
        return {"stages": {**sizes, "passes": ticks.passes, "bubble": ticks.bubble, "kept_inputs": ticks.kept}}

    def _sent(self) -> dict[str, Any]:
        """Return the collectives of a training step as JSON, under `sent`: bytes on one device, the bytes and the
        seconds that computation does not hide (`exposed_bytes`, `exposed_s`), and the seconds that it hides, all of
        them with those of idle ticks of a pipeline; empty without any, and for other software's pipeline."""
        sent = round(sum(each.times * each.bytes for each in collectives(self.work)))
        if self.work.kind != "train" or not sent or self.stack.pipeline.stages > 1:
            return {}
        times = {"exposed_s": self.time.exposed, "hidden_s": self.time.hidden}
        return {"sent": {"bytes": sent, "exposed_bytes": round(self.time.exposed_bytes), **times}}

    def _of_its_kind(self) -> dict[str, Any]:
        match self.work.kind:
            case "train":
                run = (
                    self._sent()
                    | self._of_local_sgd()
                    | {
                        "steps": self.work.steps,
                        "run_s": self.run_s,
                        "usd_per_run": self.usd_per_run,
                    }
                )
                return {"layers": self.layers and self.layers.row(), **run}
            case "prefill":
                return {"time_to_first_token_s": self.time.expected, **self._of_the_engine()}
            case _:
                per_token = self.time.expected / self.work.tokens_per_sequence
                return {"time_per_token_s": per_token, **self._of_the_engine(), **speculation_row(self.work)}

    def _of_local_sgd(self) -> dict[str, Any]:
        """Return the step of the outer optimizer as JSON, under `outer_step`; empty without `local_sgd`."""
        if self.work.local_sgd is None:
            return {}
        sent = sum(each.bytes for each in collectives(self.work) if each.of == OUTER)
        took = Network(self.target, self.work.layout).seconds("all-reduce", sent, self.work.rules.replicas)
        row = {"period": self.work.local_sgd.period, "replicas": self.work.replicas, "bytes": sent, "time_s": took}
        return {"outer_step": row}

    def _of_the_engine(self) -> dict[str, Any]:
        all_steps = [work.engine_steps for work in self.work.without_drafts().by_step_shape()]
        shapes = [{"rows": each.shape.rows, "draws": each.shape.decode, "times": each.times} for each in all_steps]
        engine = {"sequences_per_shard": self.work.slots, "page": self.work.page, "steps": shapes}
        state = state_bytes_per_sequence(self.work)
        of_state = {"state_bytes_per_sequence": state} if state else {}
        return {"kv_bytes_per_token": kv_bytes_per_token(self.work), **of_state, "engine": engine}


def plan(work: Workload, target: Target, stack: Stack = JAXLM) -> Plan:
    """Count a workload on a target, as jaxlm runs it or under another stack.

    Raises InputError where the mesh does not make up the target's devices, where the chip lacks a figure that is
    needed, or where the sequence is longer than the model's context.
    """
    stages = stack.pipeline.stages
    check_width(work, stack)
    if stages > 1 and work.kind != "train":
        raise InputError("a pipeline is planned in training alone: leave pipeline.stages out, or plan --workload train")
    if stages > 1 and work.stages > 1:
        raise InputError(
            f"mesh.pipeline = {work.stages} is jaxlm's pipeline and pipeline.stages = {stages} that of other software: "
            "leave one of them out"
        )
    if work.layout.size * stages != target.devices:
        of_stages = f" for each of {stages} stages" if stages > 1 else ""
        raise InputError(
            f"the mesh {work.layout} has {work.layout.size} devices{of_stages} and {target} has {target.devices}: "
            f"{' × '.join(work.layout)} must give that number"
        )
    if target.slices > 1:
        over_slices(work.layout, target.slices)
    if work.kind == "train" and (work.batch % work.microbatches or work.row_shards() < work.batch_shards):
        raise InputError(
            f"{work.batch_shards} shards of the batch on {work.layout} do not divide the {work.batch:,} sequences in "
            f"{work.microbatches} microbatches: take a multiple of {work.batch_shards * work.microbatches:,}"
        )
    if work.sequence > work.model.context_length:
        raise InputError(
            f"a sequence of {work.sequence} is longer than model.context_length = {work.model.context_length}"
        )
    check_drafts(work)
    work, layers = work.on(target.chip), None
    if work.kind == "train":
        layers = choose(work, target.chip.device_capacity(), stack)
        work = work.with_execution(scan_layers=layers.in_loop)
    return Plan(work, target, flops(work), stack_memory(work, stack), step_time(work, target, stack), layers, stack)


def speculation_row(work: Workload) -> dict[str, Any]:
    """Return the drafts of a decoding step as JSON, under `speculation`; empty without drafts."""
    if not work.drafts:
        return {}
    row = {name: getattr(work, name) for name in ("drafts", "acceptance", "tokens_per_sequence")}
    if work.draft_model is not None:
        counts = parameter_counts(draft_reading(work))
        row["model"] = {"parameters": counts["total"], "quantize": work.draft_model.quantize}
    return {"speculation": row}


def check_drafts(work: Workload) -> None:
    """Raise InputError for drafts that the engine cannot read, or cannot draw with the draft model."""
    if not work.drafts:
        return
    layouts = [page_layout(replace(work, model=model)) for model in work.models]
    if any(layout.carries_states for layout in layouts):
        raise InputError(
            "drafts are taken back where they are wrong, which the state of a recurrent layer cannot; a model with "
            "such layers takes no inference.speculate, and draws no drafts"
        )
    if work.draft_model is None:
        return
    own, its = work.model.vocab_size, work.draft_model.model.vocab_size
    if abs(own - its) >= _PADDING:
        raise InputError(
            f"the draft model has model.vocab_size = {its}, and not the tokens of a model of {own}: take one of the "
            "same tokenizer"
        )
    context = work.draft_model.model.context_length
    if work.sequence > context:
        raise InputError(
            f"the draft model has a context of {context:,} tokens, and sequences have {work.sequence:,}; plan for at "
            "most as many (inference.length), or take another draft model"
        )
    if not mesh_layout.may_serve(work.layout, work.draft_model.model):
        raise InputError(f"the mesh {work.layout} does not divide the query heads or the experts of the draft model")
    kv_cache(work)  # refuses windows without pages


def check_width(work: Workload, stack: Stack) -> None:
    """Raise InputError where both the stack and the workload say how wide weights are."""
    for each in (work, draft_reading(work)) if work.draft_model else (work,):
        if stack.precision is not None and each.quantized is not None:
            raise InputError(
                f"precision = {stack.precision} of the stack and execution.quantize = {each.quantized.kind} are both "
                "the width of weights; leave one of them out"
            )


def parameter_counts(work: Workload) -> dict[str, int]:
    """Return the number of parameters: in total, active for each token, in the embedding tables, and in training of
    the parameters that train. State is counted by itself, where there is any."""
    work = work.with_execution(quantize="none")  # whose leaves are numbers of parameters
    declared = {path: d for path, d in work.parameters.items() if not d.is_state}
    sizes = {path: math.prod(d.shape) for path, d in declared.items()}
    total = sum(sizes.values())
    tables = sum(sizes[path] for path, d in declared.items() if d.table)
    counts = {"total": total, "active": round(sum(sizes[path] * active_share(work, path) for path in sizes))}
    counts["embedding"] = tables
    if state := sum(math.prod(d.shape) for d in work.parameters.values() if d.is_state):
        counts["state"] = state
    if work.kind == "train":
        counts["trainable"] = total - sum(sizes.get(path, 0) for path in work.frozen)
    return counts


def mfu(flops: float, seconds: float, chip: Chip, chips: int, dtype: str) -> float:
    """Return the rate of these FLOPs in these seconds, as a share of the chips' peak."""
    return flops / (seconds * chips * chip.peak(dtype))
