"""Conversion of a Hugging Face directory into a run, and of a run into one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.config import mesh_layout
from jaxlm.config.experiment import Experiment
from jaxlm.core import buckets, copies
from jaxlm.core.addresses import address, with_addresses
from jaxlm.core.errors import InputError
from jaxlm.core.files import replace, unwritable
from jaxlm.families import hub, post_processor, safetensors, tokens
from jaxlm.families.files import (
    CONFIG,
    DTYPES,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    is_adapter,
    is_gguf,
    is_published,
)
from jaxlm.runs.folder import Run
from jaxlm.runs.job_folder import write_files
from jaxlm.runs.published import PublishedSource
from jaxlm.runs.source import ModelSource, ModelText
from jaxlm.training.paths import written_apart

if TYPE_CHECKING:
    import jax

    from jaxlm.models.tree import Tree


class Converted(NamedTuple):
    """The family of a model that was exported, and its parameters."""

    family: str
    parameters: int


class Imported(NamedTuple):
    """The family of a model that was imported, its parameters, and the dtype that it is stored in and computes in."""

    family: str
    parameters: int
    dtype: str


def import_run(path: Path, out: Path, say: Callable[[str], None]) -> Imported:
    """Convert a model in a Hugging Face directory, or of the Hub, into a run, once, in the dtype that it is stored in.

    The small files of the directory are copied to `huggingface/` of the run, for its tokenizer and for an export.
    Training continues in no such folder, but from it. Raises InputError where the directory is broken or the folder is
    taken.
    """
    import jax

    from jaxlm.models.tree import parameter_count, paths
    from jaxlm.parallel.devices import mesh_here
    from jaxlm.parallel.rules import FORWARD
    from jaxlm.training import checkpoints

    _check_published(path)
    published, run = PublishedSource(path), Run(out)
    source, experiment = published.model, published.experiment()
    run.paths.check_name()
    _check_free(out, out.exists() and (not out.is_dir() or any(out.iterdir())))
    for remark in source.remarks():
        say(remark)
    say(f"{source.family.name}: {len(source.tensors)} tensors")
    if published.text.has_tokenizer:
        published.text.load_tokenizer()  # refused before the weights are read
    elif code := tokens.code(source.folder):
        say(f"{code} is code and is not run: the run has no tokenizer")
    mesh = mesh_here(1, lambda devices: mesh_layout.layout(experiment, devices, "decode"))
    with jax.set_mesh(mesh):
        parameters = source.load(mesh, FORWARD)  # sharded as in training, but for what these devices do not divide
        finite = jax.jit(lambda tree: jax.tree.map(_is_finite, tree))(parameters)
    if not_finite := [path for path, good in paths(finite).items() if not good]:
        say(f"not all numbers are finite in {', '.join(not_finite)}")
    write_files(published.weights.sidecar_files(), run.paths.huggingface)
    if mtp_tensors := published.weights.mtp_tensors():
        safetensors.write(run.paths.mtp, mtp_tensors, {"format": "pt"})
    published.weights.origin().save(run.paths.origin)
    if published.text.has_tokenizer:
        run.paths.tokenizer.write_bytes(published.text.tokenizer_file.read_bytes())
        data = experiment.data.model_copy(update={"tokenizer": with_addresses(run.paths.tokenizer)})
        experiment = experiment.model_copy(update={"data": data})
    execution = experiment.execution.model_copy(update={"dtype": published.weights.published_dtype})
    experiment = experiment.model_copy(update={"execution": execution})
    checkpoints.save_parameters(run.paths.checkpoints, parameters)
    replace(run.paths.config, experiment.to_toml())  # last: it makes the folder a run
    copies.push(run.paths.directory, leave_out=written_apart)
    return Imported(source.family.name, parameter_count(source.model), execution.dtype)


def _check_published(path: Path) -> None:
    """Raise InputError where a path is that of a run, or of no model that can be imported."""
    if hub.is_name(path) or is_gguf(path):
        return
    run = Run(path)  # which fetches what is in a bucket
    if run.paths.are_of_a_run:
        raise InputError(f"{run} is a run already; use it as it is, or give a Hugging Face directory")
    if not is_published(path) and not is_adapter(path):
        why = "is a file" if path.is_file() else f"holds no {CONFIG}" if path.exists() else "is not there"
        raise InputError(f"{run} {why}; give a Hugging Face directory, hf:ORG/NAME or a GGUF file")


def _is_finite(x: "jax.Array") -> "jax.Array":
    """Return whether all numbers are finite, by their extremes: XLA would keep an answer for each number."""
    from jax.numpy import isfinite

    return isfinite(x.min()) & isfinite(x.max())


def export(
    source: ModelSource, parameters: "Tree", experiment: Experiment, out: Path, say: Callable[[str], None]
) -> Converted:
    """Write a Hugging Face directory of a model.

    A run that was imported, or started from published weights, gives back the files that it came with and the dtypes of
    its tensors; another is in float32, with its own tokenizer. Raises InputError for a model of no family, and for a
    folder that is there.
    """
    from jaxlm.families import directory
    from jaxlm.models.tree import parameter_count

    check_new(out)
    sidecar_files = source.weights.sidecar_files()
    dtypes = json.loads(sidecar_files.pop(DTYPES, b'{"": "F32"}'))
    if not tokens.among(sidecar_files) and source.text.has_tokenizer:
        sidecar_files = _own_tokenizer(source.text, experiment) | sidecar_files
    if experiment.data.of_conversations:
        sidecar_files = ending_answers(source, sidecar_files)
    family = directory.write(
        out, experiment.model, parameters, dtypes, sidecar_files, say, source.weights.mtp_tensors()
    )
    copies.push(out)
    return Converted(family.name, parameter_count(experiment.model))


def ending_answers(source: ModelSource, sidecar_files: dict[str, bytes]) -> dict[str, bytes]:
    """Return files that name what the run's own template needs: in tokenizer_config.json the tokens that it writes by
    name, and in generation_config.json the token that ends an answer."""
    template = source.chat.template()
    if template is None:
        return sidecar_files
    changed: dict[str, dict[str, Any]] = {}
    settings = json.loads(sidecar_files.get(TOKENIZER_CONFIG, b"{}"))
    if unnamed := {name for name in template.reads & template.variables.keys() if settings.get(name) is None}:
        changed[TOKENIZER_CONFIG] = settings | {name: template.variables[name] for name in sorted(unnamed)}
    if ends := template.stop_token_ids - template.tokenizer.stop_token_ids:
        known = [*sorted(ends), *sorted(template.tokenizer.stop_token_ids)]
        changed[GENERATION] = json.loads(sidecar_files.get(GENERATION, b"{}")) | {"eos_token_id": known}
    contents = {name: json.dumps(content, indent=2, ensure_ascii=False) for name, content in changed.items()}
    return sidecar_files | {name: content.encode() for name, content in contents.items()}


def check_new(folder: Path) -> None:
    """Raise InputError where a folder to be made is there, or cannot be made."""
    if (url := address(folder)) is not None:
        buckets.check_writable(url)
    copies.pull(folder, copies.without_weights)
    _check_free(folder, folder.exists())


def _check_free(folder: Path, is_taken: bool) -> None:
    if is_taken:
        raise InputError(f"{folder} exists already; give another folder")
    if (why := unwritable(folder)) is not None:
        raise InputError(f"{folder} cannot be made ({why}); give another folder")


def _own_tokenizer(text: ModelText, experiment: Experiment) -> dict[str, bytes]:
    """Return the files of a tokenizer of ours: a text begins after its separator, and ends with it."""
    tokenizer, described = text.load_tokenizer(), json.loads(text.tokenizer_file.read_text(encoding="utf-8"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": experiment.model.context_length,
        "clean_up_tokenization_spaces": False,
    }
    generation: dict[str, Any] = {}
    if (separator := tokenizer.separator) is not None:
        name = tokenizer.name_of(separator)
        settings |= {"bos_token": name, "eos_token": name}
        generation |= {"bos_token_id": separator, "eos_token_id": separator}
        described["post_processor"] = post_processor.template(name, separator)
    contents = {TOKENIZER: described, "tokenizer_config.json": settings, "generation_config.json": generation}
    return {name: json.dumps(content, indent=2, ensure_ascii=False).encode() for name, content in contents.items()}
