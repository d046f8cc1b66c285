"""The source of a model at a path: a run, one with adapters and its base, or a published model."""

from pathlib import Path

from jaxlm.core.addresses import place
from jaxlm.core.errors import InputError
from jaxlm.families import hub
from jaxlm.families.files import is_adapter, is_gguf, is_published
from jaxlm.runs.adapters import AdaptedWeights
from jaxlm.runs.folder import Run
from jaxlm.runs.published import PublishedSource
from jaxlm.runs.source import ModelSource
from jaxlm.runs.trained import RunSource


def source_of(path: Path) -> ModelSource:
    """Return a run folder or a Hugging Face directory, whichever is there, a model of the Hub or in a GGUF file."""
    run = Run(path)
    is_directory = is_published(path) or is_adapter(path)
    if hub.is_name(path) or is_gguf(path) or (is_directory and not run.paths.config.is_file()):
        return PublishedSource(path)
    if not run.has_adapters:
        return RunSource(run)
    base = needed_by(path)
    if base is None:
        raise InputError(f"{run} has adapters, and no {run.paths.origin.name} says of which model; put it back")
    return RunSource(run, AdaptedWeights(run, base.weights))


def needed_by(path: Path) -> ModelSource | None:
    """Return the source whose weights the run in a folder still needs: those that it begins with and has no checkpoint
    of yet, or that its adapters adapt. Raises InputError where they are not there."""
    run = Run(path)
    if (origin := run.begun_from) is None or (run.has_checkpoint and not run.has_adapters):
        return None
    source = source_of(place(origin.pinned))
    try:
        source.experiment()
    except InputError as error:
        needs = "adapts" if run.has_adapters else "has no checkpoint yet and begins with"
        raise InputError(f"{run} {needs} {origin.source}: {error}") from None
    return source
