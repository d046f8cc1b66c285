"""Search for the fastest training step that fits, by compiling variants."""

from collections.abc import Callable, Collection
from dataclasses import replace

from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment
from jaxlm.costs.counted.memory import memory
from jaxlm.costs.hardware.target import Target
from jaxlm.costs.layer_loops import resolved
from jaxlm.costs.plan import plan
from jaxlm.costs.search import variants
from jaxlm.costs.workload import Workload
from jaxlm.lowering.report import CompiledStep, DoesNotFit, FitTrial, compile
from jaxlm.parallel.layout import Layout

# Tolerance on the count, once corrected by earlier compilations.
_TOLERANCE = 1.05


def compile_fitting(
    experiment: Experiment,
    target: Target,
    mesh: Mesh,
    quick: bool,
    say: Callable[[str], None],
    fixed: Collection[str] = (),
) -> CompiledStep:
    """Compile the variants of a training step that `fit` chooses, and return the best; if none fits, the variant that
    needs least. Raises DoesNotFit if the compiler refuses that variant."""
    compiled: dict[Workload, CompiledStep] = {}
    refused: dict[Workload, DoesNotFit] = {}

    def needed(work: Workload) -> int:
        training = experiment.training.model_copy(update={"microbatches": work.microbatches})
        execution = experiment.execution.model_copy(update={"remat": work.remat})
        variant = experiment.model_copy(update={"training": training, "execution": execution})
        try:
            compiled[work] = compile(variant, "train", target, mesh, quick)
        except DoesNotFit as error:
            refused[work] = error
            return error.needed
        return compiled[work].report.memory.peak

    best, tried = fit(Workload.of(experiment, Layout(mesh.shape)), target, needed, say, fixed)
    if best is None:
        best = min(tried, key=lambda t: t.needed).work
    if best in refused:
        refused[best].tried = tuple(tried)
        raise refused[best]
    return replace(compiled[best], tried=tuple(tried))


def fit(
    work: Workload,
    target: Target,
    needed: Callable[[Workload], int],
    say: Callable[[str], None],
    fixed: Collection[str] = (),
) -> tuple[Workload | None, list[FitTrial]]:
    """Return the fastest variant of a workload that fits, by counted time, and all compiled variants.

    Variants differ in the microbatch and the rematerialisation; the mesh stays. The result is None if no variant fits.
    Variants that are slower than a fitting one are skipped, and so are variants far beyond capacity by the count,
    corrected by the compilations so far.

    Args:
      needed: compiles a variant and returns the bytes that it needs on one device.
      say: is given a line before each compilation.
      fixed: names of settings that do not vary.
    """
    capacity, work = target.chip.device_capacity(), work.on(target.chip)

    def counted(work: Workload) -> int:
        return memory(resolved(work, capacity)).total

    waiting = sorted(variants(work, fixed), key=lambda w: plan(w, target).time.expected)
    tried: list[FitTrial] = []
    best: Workload | None = None
    while chosen := _next(waiting, tried, capacity, counted):
        say(f"compiling {chosen.overrides()}")
        tried.append(FitTrial(chosen, needed(chosen)))
        at = waiting.index(chosen)
        if tried[-1].needed <= capacity:
            best, waiting = chosen, waiting[:at]
        else:
            waiting.remove(chosen)
    return best, tried


def _next(
    waiting: list[Workload], tried: list[FitTrial], capacity: int, counted: Callable[[Workload], int]
) -> Workload | None:
    """Return the fastest variant that may fit; if none is expected to and none has, the one that needs least memory."""
    ratio = min((t.needed / counted(t.work) for t in tried), default=1.0)
    hopeful = [w for w in waiting if counted(w) * ratio <= capacity * (_TOLERANCE if tried else 1.0)]
    if hopeful:
        return hopeful[0]
    if waiting and not any(t.needed <= capacity for t in tried):
        least = min(waiting, key=counted)
        return least if not tried or counted(least) * ratio <= capacity * 2 else None
    return None
