"""The weights of a run with adapters: those of its base, with the adapters added. Their export as a PEFT directory."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlm.config import mesh_layout
from jaxlm.core import copies
from jaxlm.core.addresses import place
from jaxlm.data.config import HUGGING_FACE
from jaxlm.families.files import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    is_gguf,
    is_published,
    read_json,
    text_of,
)
from jaxlm.runs.conversion import Converted, check_new, ending_answers
from jaxlm.runs.folder import Run
from jaxlm.runs.source import ModelSource, ModelWeights, WeightsRequest
from jaxlm.runs.trained import RunWeights
from jaxlm.training.origin import Origin

if TYPE_CHECKING:
    from jaxlm.families.family import Family
    from jaxlm.models.lora_config import LoraConfig
    from jaxlm.models.tree import Tree


class AdaptedWeights(RunWeights):
    """The weights of a base with the adapters of a run added."""

    def __init__(self, run: Run, base: ModelWeights):
        super().__init__(run)
        self._base = base

    @property
    def lora(self) -> "LoraConfig":
        """The section [lora] of the run."""
        lora = self.run.experiment().lora
        assert lora is not None
        return lora

    def checked_base(self) -> Origin:
        """Return the record of the base. Raises InputError where its weights have changed."""
        origin = self.run.begun_from
        assert origin is not None
        origin.check(self.run, self._base.digest(origin.step))
        return origin

    def adapters(self, request: WeightsRequest) -> "tuple[int, Tree]":
        """Return a step and its adapters alone, float32. Raises InputError as `restore` does."""
        from jaxlm.models import tree as model_tree

        adapters, _ = model_tree.trained(model_tree.abstract(request.model, self.lora)[1])
        return self.restore_tree(adapters, request._replace(dtype="float32"))

    def restore(self, request: WeightsRequest) -> "tuple[int, Tree]":
        """Return a step and the sums of the base's matrices and the adapters: of the base as the adapters were trained
        with it. Raises InputError where there is no whole checkpoint, or where the base has changed."""
        from jaxlm.models import tree as model_tree
        from jaxlm.models.quantizing import Quantizer

        model, lora, of_base = request.model, self.lora, self.run.experiment().execution.quantization
        step, adapters = self.adapters(request)
        base_step = self.checked_base().step
        dtype = "float32" if request.quantized else request.dtype  # rounded once
        checkpoint = "newest" if base_step is None else base_step
        of_all = request._replace(checkpoint=checkpoint, average=False, dtype=dtype, quantized=of_base)
        _, parameters = self._base.restore(of_all)
        parameters = model_tree.under_adapters(parameters, model_tree.targets(model, lora))
        joined = model_tree.joined(parameters, adapters)
        sums = model_tree.merged(model, lora, joined, request.mesh, request.rules, of_base)
        if request.quantized is not None:
            quantizer = Quantizer(model, request.quantized, request.mesh, request.rules, request.dtype)
            return step, quantizer.tree(sums)
        if of_base is not None and request.dtype is not None:
            sums = model_tree.cast(model_tree.abstract(model)[1], sums, request.dtype)
        return step, sums

    def digest(self, step: int | None = None) -> str:
        """Return a digest of a step of the adapters and of their base."""
        return f"{super().digest(step)}+{self._base.digest(self.checked_base().step)}"


def export(
    source: ModelSource,
    weights: AdaptedWeights,
    out: Path,
    checkpoint: str,
    average: bool,
    say: Callable[[str], None],
) -> Converted:
    """Write the adapters of a source, its `weights`, as a PEFT directory, and return the family and their numbers.
    Beside adapters that are trained on conversations lie the chat template and what ends an answer.

    Raises InputError for a model of no family, for a folder that is there, and as `AdaptedWeights.restore` does.
    """
    from jaxlm.families import peft
    from jaxlm.parallel.devices import mesh_here
    from jaxlm.parallel.rules import ENGINE

    check_new(out)
    run, origin = weights.run, _as_published(weights.checked_base())
    experiment, of_family = run.experiment(), family_of(run)
    name = origin.source.removeprefix(HUGGING_FACE).partition("@")[0] if origin.revision else origin.source
    if not _is_published(origin):
        say(f"{name} is no Hugging Face directory, as PEFT needs one: export it, and put that in {ADAPTER_CONFIG}")
    mesh = mesh_here(1, lambda devices: mesh_layout.layout(experiment, devices, "decode"))
    request = WeightsRequest(experiment.model, mesh, ENGINE, "float32", checkpoint, average, say)
    _, adapters = weights.adapters(request)
    base = {"base_model_name_or_path": name} | ({"revision": origin.revision} if origin.revision else {})
    beside = _chat_files(source) if experiment.data.of_conversations else {}
    parameters = peft.write(out, experiment.model, of_family, weights.lora, adapters, base, beside)
    copies.push(out)
    return Converted(of_family.name, parameters)


def family_of(run: Run) -> "Family":
    """Return the family that a run's model is of: that of the files which it was imported from, or the plainest that
    has all its parts. Raises InputError for a model of none."""
    from jaxlm.families import family, settings

    published = run.paths.huggingface / CONFIG
    if published.is_file():
        return family.named(text_of(read_json(published)).get("model_type"), str(published))
    return settings.family_of(run.experiment().model)


def _as_published(base: Origin) -> Origin:
    """Return the record of a base, or of the files that it was imported from if they are there: PEFT opens these."""
    run = Run(place(base.source)) if base.kind == "run" else None
    before = run.begun_from if run is not None and run.is_imported else None
    return before if before is not None and _is_published(before) else base


def _is_published(origin: Origin) -> bool:
    """Return whether a model is one of the Hub, or in a Hugging Face directory or GGUF file that is there."""
    folder = place(origin.source)
    return origin.revision is not None or is_published(folder) or is_gguf(folder)


def _chat_files(source: ModelSource) -> dict[str, bytes]:
    """Return the files that show and end a conversation as the run was trained."""
    from jaxlm.data.chat_template import FILE

    template = source.chat.template()
    if template is None:
        return {}
    named = ending_answers(source, source.weights.sidecar_files())
    kept = {name: named[name] for name in (GENERATION, TOKENIZER_CONFIG) if name in named}
    return {FILE: template.source.encode()} | kept
