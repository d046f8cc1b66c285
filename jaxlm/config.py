"""The experiment: every section of a TOML file, composed, resolved and checked before JAX starts."""

import copy
import functools
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, create_model

from jaxlm.core import addresses, bundled, copies, plugins, toml
from jaxlm.core.errors import InputError
from jaxlm.core.explain import explain
from jaxlm.core.moved_keys import former, with_present_keys
from jaxlm.core.plugins import Plugin
from jaxlm.core.schema import NONE, Section, chosen, kind_of, leaves, merged, sections_at, without_none
from jaxlm.data.config import BYTES_VOCABULARY
from jaxlm.families import hub
from jaxlm.families.files import CONFIG as PUBLISHED
from jaxlm.families.files import config_dtype, is_gguf, is_published, read_json
from jaxlm.inference.config import InferenceConfig
from jaxlm.models.config import ModelConfig
from jaxlm.models.execution_config import keys_of
from jaxlm.parallel import layout_choice
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.layout import Layout
from jaxlm.parallel.layout_choice import ModelSize, some_divisors
from jaxlm.parallel.rules import ENGINE, RULES, TRAIN, Kind
from jaxlm.training.changes import is_free
from jaxlm.training.config import DEFAULT_STEPS, DecayingScheduleConfig, OptimizerConfig, RunConfig
from jaxlm.training.paths import RunPaths, small_files

# The name of a run folder: other characters, which a shell or a library may read as a pattern, and its longest part.
_UNSAFE = re.compile(r"[^\w.,=+-]", re.ASCII)
_LONGEST = 100


def _listed(names: Any) -> Any:
    return (names,) if isinstance(names, str) else names


# A key named as a keyword of Python is.
_Plugins = create_model(
    "_Plugins",
    __base__=Section,
    **{
        "import": (
            Annotated[tuple[str, ...], BeforeValidator(_listed)],
            Field(
                (),
                description="Plug-ins, which register parts: names of modules, and paths of .py files relative to this "
                "file. A run records each with a digest of its source.",
            ),
        )
    },
)


class Experiment(RunConfig, _Plugins):
    """One training run, whole: also how the devices are factored that it runs on, and the sizes of inference."""

    inference: InferenceConfig
    mesh: MeshConfig = Field(default_factory=MeshConfig)

    def to_toml(self) -> str:
        """Return every key with its value, unset ones as comments; it loads back to the same experiment."""
        return toml.to_toml(self)


def load(
    path: str | Path,
    overrides: Iterable[str] = (),
    kind: Kind | None = "train",
    *,
    model: dict[str, Any] | None = None,
    tokenizer: str | None = None,
) -> Experiment:
    """Read a TOML file, that of a run folder, a Hugging Face directory, hf:ORG/NAME of the Hub, or a configuration that
    comes with jaxlm by its name; apply `key=value` overrides with dotted keys, fill in and check everything that a step
    of this kind asks for; None asks for what all have in common.

    `model.base = "FILE"`, relative to the file it stands in, names a TOML file whose [model] the other keys of
    [model] then change. It may be a name too. A path that exists goes before a name. Where the file has no [model],
    `model` is it, and where it has no data.tokenizer, `tokenizer`. Keys of earlier versions are refused, but for those
    that a run folder keeps. Raises InputError, in one line.
    """
    path, is_record = _found(path)
    values, plugged = _read(path), list[Plugin]()
    _import(values, path, is_record, plugged)
    if path.name == PUBLISHED and kind in ("prefill", "decode"):
        values["execution"] = _published_execution(read_json(path), str(path))
    is_run = RunPaths(path.parent).are_of_a_run and path.name == RunPaths(path.parent).config.name
    if is_run:
        values = with_present_keys(values)
    if isinstance(values.get("model"), dict):
        values["model"] = _on_its_base(values["model"], (path,), plugged)
    if model is not None:
        values.setdefault("model", model)
    if tokenizer is not None and isinstance(values.setdefault("data", {}), dict):
        values["data"].setdefault("tokenizer", tokenizer)
    file, overrides = copy.deepcopy(values), list(overrides)
    has_model = "model" in values
    for override in overrides:
        _set(values, override)
    if "import" in overridden(overrides):
        raise InputError("import names plug-ins in a file; here give --import MODULE")
    values["import"] = [*dict.fromkeys(map(str, (*plugged, *plugins.of_command())))]
    _refuse_other_sizes(overridden(overrides), kind)
    _leave_other_kinds(values, file, set(overridden(overrides)))
    values = without_none(values, [Experiment])
    _leave_other_length(values, {key for key, value in _overridden(overrides).items() if value != NONE})
    filled = _fill(values)
    try:
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        hint = "" if has_model else "; jaxlm config --example prints a whole file"
        if is_record and any(one["type"] == "union_tag_invalid" for one in error.errors()):
            hint = "; where a plug-in registers it, give that: --import MODULE"
        given = set(overridden(overrides))
        in_file = not all(".".join(map(str, one["loc"])) in given for one in error.errors())
        said = f"{explain(error, Experiment, values, filled)}{hint}"
        raise InputError(f"{path}: {said}" if in_file else said) from None
    _check(experiment, kind)
    if not is_run or "inference.context" in overridden(overrides):  # earlier versions took the model's in its place
        _check_context(experiment)
    _check_state_interval(experiment)
    if kind == "train" and not is_run and path.name != PUBLISHED:  # which have a tokenizer, or need none
        _check_new_tokenizer(experiment)
    if installed := plugins.installed_of(type(section).__module__ for section in _sections(experiment)):
        named = [*dict.fromkeys((*values["import"], *map(str, installed)))]
        return experiment.model_copy(update={"import": tuple(named)})
    return experiment


def _import(values: dict[str, Any], path: Path, is_record: bool, plugged: list[Plugin]) -> None:
    """Import the plug-ins that a file names, and add them to `plugged`. Raises InputError."""
    plugins.load_installed()
    names = _listed(values.pop("import", ()))
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f'{path}: import = {names!r} must be a list of names, such as ["mine.py"]')
    is_record = is_record or plugins.in_folder_of_model(path) is not None
    for name in names:
        of = path.parent if path.parent.name else path
        plugged.append(plugins.load_recorded(name, of) if is_record else plugins.load(name, path.parent, str(path)))


def _sections(section: Section) -> Iterator[Section]:
    """Yield a section and those inside it."""
    yield section
    for value in section.__dict__.values():
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Section):
                yield from _sections(inner)


def with_steps(experiment: Experiment, steps: int) -> Experiment:
    """Return an experiment whose training lasts so many steps, in place of `training.epochs`; a decay for which no end
    is given ends with them."""
    training = experiment.training.model_copy(update={"steps": steps, "epochs": None})
    optimizer, schedule = experiment.optimizer, experiment.optimizer.schedule
    if isinstance(schedule, DecayingScheduleConfig) and schedule.decay_steps is None:
        schedule = schedule.model_copy(update={"decay_steps": steps})
        optimizer = optimizer.model_copy(update={"schedule": schedule})
    return experiment.model_copy(update={"training": training, "optimizer": optimizer})


def resolved(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that a run recorded, maybe of an earlier version, as one of today's would record it; as
    it is where today's cannot read it."""
    values = with_present_keys(recorded)
    _fill(values)
    try:
        return Experiment.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return recorded


def assigned(overrides: Iterable[str], example: str = "training.steps=100") -> dict[str, Any]:
    """Return the nested values that `key=value` assignments set. Raises InputError, with an `example` of one."""
    values: dict[str, Any] = {}
    for override in overrides:
        _set(values, override, example)
    return values


def overridden(overrides: Iterable[str]) -> list[str]:
    """The dotted keys that `key=value` overrides set, of overrides that `load` took."""
    return list(_overridden(overrides))


def _overridden(overrides: Iterable[str]) -> dict[str, Any]:
    """Return {dotted key: value} of overrides."""
    return dict(leaves(assigned(overrides)))


def effective(overrides: Iterable[str], load: Callable[[list[str]], Experiment]) -> list[str]:
    """Return the overrides without those that set what the rest of the configuration, as `load` returns it, gives."""
    left = list(overrides)
    for key in dict.fromkeys(override.partition("=")[0].strip() for override in left):
        others = [override for override in left if override.partition("=")[0].strip() != key]
        try:
            same = load(others).model_dump(mode="json") == load(left).model_dump(mode="json")
        except InputError:  # without it there is none
            continue
        left = others if same else left
    return left


def default_run(
    path: Path, overrides: Iterable[str], experiment: Experiment, start_from: str | Path | None = None
) -> Path:
    """Return the folder of a run that is given none: CONFIG if it is one, else `runs/`, the name of CONFIG and the
    overrides that make another run, such as `runs/quickstart,batch=8,optimizer=muon`, and the model it starts from.

    Equal overrides in any order give equal names, and others other names. Those that set what CONFIG has anyway are
    left out.
    """
    if path.is_dir():
        return path
    overrides = effective(overrides, partial(load, path))
    by_former_key = sorted(_overridden(overrides).items(), key=lambda item: former(item[0]))
    settings = {key: value for key, value in by_former_key if not is_free(key)}
    if getattr(experiment.optimizer.schedule, "decay_steps", None) == experiment.training.steps:
        length = ("training.steps", "training.epochs")
        settings |= {key: value for key, value in _overridden(overrides).items() if key in length}
    if start_from is not None:
        settings |= {"from": Path(start_from).name}
    stem = bundled.find(path).stem
    exact = ",".join([stem, *(f"{_short(key)}={_text(value)}" for key, value in settings.items())])
    name = _UNSAFE.sub("-", exact)[:_LONGEST]
    if name != exact:
        name += f",{hashlib.sha256(exact.encode()).hexdigest()[:8]}"
    return Path("runs") / (name if settings else stem)


def _short(key: str) -> str:
    """Return a key without its section, which the rest tells; the kind of a section has the section's name."""
    whole = key.removesuffix(".kind")
    return whole.partition(".")[2] or whole


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# The keys of the size of a step: its sequences, and the tokens of each.
SIZE_KEYS: dict[Kind, tuple[str, str]] = {
    "train": ("training.batch", "training.sequence"),
    "prefill": ("inference.sequences", "inference.prompt"),
    "decode": ("inference.sequences", "inference.length"),
}
# Tokens per row where nothing says how many, of a model whose context is longer.
DEFAULT_SEQUENCE = 8192
# Keys of sizes that may be rounded up to suit a mesh; others are bound to one another.
_PADDABLE = ("vocab_size", "d_ff")
# What a mesh must divide in inference, where what it does not divide may stay whole.
_DIVIDED = frozenset({"heads", "experts"})
_INFERENCE = replace(ENGINE, may_stay_whole=ENGINE.may_stay_whole - _DIVIDED)


def layout(experiment: Experiment, devices: int, kind: Kind = "train") -> Layout:
    """Return the experiment's mesh layout on this many devices, checked.

    Raises InputError where it does not fit the devices or, in training, the model and the batch.
    """
    if kind == "train":
        mesh_layout = layout_of_any_batch(experiment, devices)
    else:
        mesh_layout = experiment.mesh.layout(devices)
        layout_choice.check_used(mesh_layout, RULES[kind])
    check_layout(experiment, mesh_layout, kind, devices)
    if kind == "train":
        _check_used(experiment, mesh_layout)
    return mesh_layout


def layout_of_any_batch(experiment: Experiment, devices: int) -> Layout:
    """Return the experiment's mesh layout in training on this many devices, for a batch that it divides.

    Raises InputError where it does not fit the devices or the model.
    """
    sizes = divided_by_mesh(experiment.model)
    mesh_layout = layout_choice.training_layout(experiment.mesh, devices, TRAIN, sizes)
    layout_choice.check_divides(mesh_layout, TRAIN, sizes, devices)
    return mesh_layout


def say_layout(experiment: Experiment, layout: Layout) -> str | None:
    """Return a line that says that a step of training has another layout than its mesh gives, which does not divide the
    model, or that an axis of it has no experts to shard; None where neither is so."""
    divided = layout_choice.say_divided(experiment.mesh, layout, TRAIN, divided_by_mesh(experiment.model))
    over = _several(TRAIN.over("experts"), layout)
    if not over or _has_experts(experiment.model):
        return divided
    shards, (like, *_) = layout.over(over), TRAIN.over("embed")
    idle = f"{layout_choice.describe_axes(over)} = {shards} is more of mesh.{like}: the model has no experts"
    return f"{divided}; {idle}" if divided else idle


def _has_experts(model: ModelConfig) -> bool:
    return any(size.axis == "experts" for size in divided_by_mesh(model))


def check_layout(experiment: Experiment, layout: Layout, kind: Kind = "train", devices: int | None = None) -> None:
    """Raise InputError where a layout does not divide the model or the batch in training, naming the number to change,
    or a mesh of so many `devices`.

    In inference the heads of queries and the experts must divide too; another dimension that the layout does not divide
    stays whole on every device.
    """
    if kind != "train":
        layout_choice.check_divides(layout, _INFERENCE, _divided_in_inference(experiment.model), devices)
        return
    training = experiment.training
    layout_choice.check_divides(layout, TRAIN, divided_by_mesh(experiment.model), devices)
    _check_rounds(experiment, layout)
    over = _several(TRAIN.over("batch"), layout)
    rows, parts = training.batch // training.microbatches, layout.over(over)
    if rows % parts:
        fitting = math.ceil(rows / parts) * parts * training.microbatches
        raise InputError(
            f"{layout_choice.describe_axes(over)} = {parts} does not divide the {rows} rows of a microbatch "
            f"(training.batch / training.microbatches): set training.batch to {fitting}"
        )
    if layout.over(TRAIN.over("layers")) > 1:
        check_stages(experiment)
    if training.local_sgd is not None and devices is not None and layout.over(TRAIN.replicas) == 1:
        raise InputError(
            f"training.local_sgd trains a replica for each shard of {layout_choice.describe_axes(TRAIN.replicas)}, and "
            "there is 1: set it to the number of slices, for example, or leave training.local_sgd out"
        )
    over = _several(TRAIN.over("sequence"), layout)
    chunks = 2 * layout.over(over)  # `jaxlm.parallel.columns`
    if chunks > 2 and training.sequence % chunks:
        fitting = math.ceil(training.sequence / chunks) * chunks
        raise InputError(
            f"2 × {layout_choice.describe_axes(over)} = {chunks} does not divide training.sequence = "
            f"{training.sequence}, of which each device has two chunks: set training.sequence to {fitting}"
        )
    in_order = [block.attention.kind for block in experiment.model.layers if block.attention.carries_states]
    if over and in_order:
        raise InputError(
            f"model.attention.kind = {in_order[0]} reads the tokens of a sequence in order: set "
            f"{layout_choice.describe_axes(over)} to 1"
        )


def _several(mesh_axes: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """Return those mesh axes that have several devices."""
    return tuple(axis for axis in mesh_axes if layout[axis] > 1)


def _check_local_sgd(experiment: Experiment) -> None:
    """Raise InputError for what replicas that train by themselves do not do."""
    if experiment.training.ema_decay is not None:
        raise InputError(
            "training.ema_decay averages the parameters of each step, of which training.local_sgd has several: leave "
            "either out"
        )
    if experiment.records.norms_every is not None:
        raise InputError("records.norms_every looks at one model, and training.local_sgd trains several: leave it out")


def check_stages(experiment: Experiment) -> None:
    """Raise InputError for what a step does not do on the stages of a pipeline."""
    (axis,) = TRAIN.over("layers")
    if experiment.training.local_sgd is not None:
        raise InputError(f"training.local_sgd is of whole models: leave it out, or set mesh.{axis} to 1")
    if experiment.dpo is not None:
        raise InputError(f"mesh.{axis} carries text alone, and [dpo] compares answers: set it to 1")
    if experiment.records.norms_every is not None:
        raise InputError(f"records.norms_every looks at all layers of a device: leave it out, or set mesh.{axis} to 1")


def _check_rounds(experiment: Experiment, layout: Layout) -> None:
    """Raise InputError where stages do not divide the microbatches that go around them together, or these the batch."""
    (axis,) = TRAIN.over("layers")
    rounds, stages, training = experiment.execution.pipeline_rounds, layout[axis], experiment.training
    if rounds == 1 or stages == 1:
        return
    shards = layout.over(TRAIN.over("batch"))
    microbatches = math.ceil(training.microbatches / stages) * stages
    batch = math.ceil(training.batch / (microbatches * shards)) * microbatches * shards
    wrong, right = [], []
    if training.microbatches != microbatches:
        given = f"training.microbatches = {training.microbatches}, which go around {rounds} times together"
        wrong.append(f"mesh.{axis} = {stages} does not divide {given}")
        right.append(f"training.microbatches to {microbatches}")
    if training.batch != batch:
        wrong.append(f"{microbatches} microbatches of {shards} shards do not divide training.batch = {training.batch}")
        right.append(f"training.batch to {batch}")
    if wrong:
        divides = training.batch % (training.microbatches * shards) == 0
        otherwise = ", or execution.pipeline_rounds to 1" if divides else ""
        raise InputError(f"{', and '.join(wrong)}: set {' and '.join(right)}{otherwise}")


def _check_used(experiment: Experiment, layout: Layout) -> None:
    """Raise InputError for settings of a mesh axis on a mesh that is final and has none, or of experts in a model that
    has none. A search may yet find a mesh."""
    execution, default = experiment.execution, type(experiment.execution)()
    for logical, keys in (
        ("layers", ("pipeline_rounds", "pipeline_gather")),
        ("sequence", ("context_parallel",)),
        ("experts", ("expert_parallel",)),
    ):
        (axis,) = TRAIN.over(logical)
        for key in keys:
            value, unset = (getattr(each, key) for each in (execution, default))
            if value == unset:
                continue
            if logical == "experts" and not _has_experts(experiment.model):
                raise InputError(
                    f"execution.{key} = {value} is of experts, and the model has none: set execution.{key} to {unset}"
                )
            if layout[axis] == 1:
                raise InputError(
                    f"execution.{key} = {value} needs mesh.{axis} above 1: raise it, or set execution.{key} to {unset}"
                )


def may_serve(layout: Layout, model: ModelConfig) -> bool:
    """Return whether a layout divides what it must divide in inference (`check_layout`)."""
    return layout_choice.divides(layout, _INFERENCE, _divided_in_inference(model))


def _divided_in_inference(model: ModelConfig) -> list[ModelSize]:
    return [size for size in divided_by_mesh(model) if size.axis in _DIVIDED]


def divided_by_mesh(model: ModelConfig) -> list[ModelSize]:
    """Return the sizes of a model that a mesh must divide, each once."""
    sizes: dict[ModelSize, None] = {}
    for i, (_, block) in enumerate(model.entries):
        for name, section in (("attention", block.attention), ("feed_forward", block.feed_forward)):
            for key, axis in section.logical_axes.items():
                if (size := functools.reduce(_member, key.split("."), section)) is None:
                    continue
                own = model.pattern and key in _at(model.pattern[i].patch, name)
                place = f"model.pattern[{i}]" if own else "model"
                sizes[ModelSize(axis, f"{place}.{name}.{key}", size, key in _PADDABLE)] = None
    tables = (("vocab", "vocab_size"), ("embed", "d_model"))
    return [*sizes, *(ModelSize(axis, f"model.{key}", getattr(model, key), key in _PADDABLE) for axis, key in tables)]


def _member(section: Any, key: str) -> Any:
    """Return the value of a key; None of a table that is not there."""
    return None if section is None else getattr(section, key)


def sizes(experiment: Experiment, kind: Kind) -> tuple[int, int]:
    """Return the sequences of a step, over the whole job, and the tokens of each."""
    batch, sequence = (attrgetter(key)(experiment) for key in SIZE_KEYS[kind])
    return batch, sequence


def _check(experiment: Experiment, kind: Kind) -> None:
    """Check what involves several sections. Raises InputError."""
    model, training = experiment.model, experiment.training
    if experiment.dpo is not None and not experiment.data.of_preferences:
        raise InputError("[dpo] is an objective for data.preferences, which are not given; give them or leave it out")
    if experiment.dpo is not None and training.z_loss:
        raise InputError(f"training.z_loss = {training.z_loss} is no part of [dpo]; leave it out")
    if (objective := experiment.objective.kind) != "next_token" and (experiment.dpo is not None or training.z_loss):
        other = "[dpo]" if experiment.dpo is not None else f"training.z_loss = {training.z_loss}"
        raise InputError(f"{other} is no part of objective.kind = {objective!r}; leave either out")
    _, sequence = sizes(experiment, kind or "train")
    if sequence > model.context_length:
        raise InputError(
            f"{SIZE_KEYS[kind or 'train'][1]} = {sequence} is longer than model.context_length = "
            f"{model.context_length}; lower it"
        )
    context = experiment.inference.context
    if kind in ("prefill", "decode") and context is not None and sequence > context:
        raise InputError(
            f"{SIZE_KEYS[kind][1]} = {sequence} is longer than inference.context = {context}; lower it, or raise the "
            "context"
        )
    staged = experiment.mesh.least().over(TRAIN.over("layers")) > 1 and experiment.execution.pipeline_rounds > 1
    if kind == "train" and training.batch % training.microbatches and not staged:  # see `_check_rounds`
        raise InputError(
            f"training.microbatches = {training.microbatches} does not divide training.batch = {training.batch}: "
            f"set it to one of {some_divisors(training.batch)}"
        )
    kept = () if isinstance(experiment.execution.remat, str) else experiment.execution.remat
    if unknown := [name for name in kept if name not in model.activations]:
        raise InputError(
            f"execution.remat keeps {', '.join(unknown)}, which no layer of the model has; what it can keep is "
            f"{', '.join(model.activations)}"
        )
    if kind == "train":
        check_layout(experiment, experiment.mesh.least())
        if training.local_sgd is not None:
            _check_local_sgd(experiment)


def _check_context(experiment: Experiment) -> None:
    """Raise InputError where sequences of the engine may be longer than the model's."""
    context, longest = experiment.inference.context, experiment.model.context_length
    if context is not None and context > longest:
        raise InputError(f"inference.context = {context} is longer than model.context_length = {longest}; lower it")


def _check_state_interval(experiment: Experiment) -> None:
    """Raise InputError for states to be kept that no layer has, or that are not at the ends of pages."""
    interval, page = experiment.inference.state_interval, experiment.inference.page
    if interval is None:
        return
    if not any(block.attention.carries_states for block in experiment.model.layers):
        raise InputError(
            f"inference.state_interval = {interval} is of recurrent layers, which the model has not; leave it out"
        )
    if interval % page:
        raise InputError(
            f"inference.state_interval = {interval} must be a multiple of inference.page = {page}, such as "
            f"{-(-interval // page) * page}"
        )


def check_quantized(experiment: Experiment, kind: Kind = "train") -> None:
    """Raise InputError where a step would train matrices that are quantised, or would round activations."""
    quantize = experiment.execution.quantize
    if kind == "train" and quantize != "none" and experiment.lora is None:
        raise InputError(
            f'execution.quantize = "{quantize}" is of weights that are not trained: add [lora], which trains adapters '
            'beside them, or set execution.quantize = "none"'
        )
    if kind == "train" and quantize == "w8a8":
        raise InputError(
            'execution.quantize = "w8a8" rounds activations too, which is for inference alone: train adapters beside '
            'the same weights with "int8"'
        )


def _check_new_tokenizer(experiment: Experiment) -> None:
    """Raise InputError where the model has fewer ids than the tokenizer that is made for it."""
    tokenizer, vocabulary = experiment.data.tokenizer, experiment.model.vocab_size
    if tokenizer in ("bytes", "bpe") and vocabulary < BYTES_VOCABULARY:
        raise InputError(
            f'data.tokenizer = "{tokenizer}" has at least {BYTES_VOCABULARY} tokens, more than model.vocab_size = '
            f"{vocabulary}; set model.vocab_size={BYTES_VOCABULARY}, or data.tokenizer to a file"
        )


def _refuse_other_sizes(keys: Iterable[str], kind: Kind | None) -> None:
    """Raise InputError for an override of a size that a step of inference does not have: one in [training], or the
    other workload's tokens of a sequence alone."""
    if kind not in ("prefill", "decode"):
        return
    given, tokens = set(keys), SIZE_KEYS[kind][1]
    others = {key: ("training", mine) for key, mine in zip(SIZE_KEYS["train"], SIZE_KEYS[kind], strict=True)}
    if tokens not in given:
        other: Kind = "decode" if kind == "prefill" else "prefill"
        others[SIZE_KEYS[other][1]] = other, tokens
    wrong = [f"{key} is a size of {of}: for {kind} set {mine}" for key, (of, mine) in others.items() if key in given]
    if wrong:
        raise InputError("; ".join(wrong))


def _found(name: str | Path, folder: Path = Path()) -> tuple[Path, bool]:
    """Return the file of a configuration by a path in `folder`, a name, or that of a model of the Hub; and whether it
    is the record of a model. A run folder, a Hugging Face directory or a GGUF file holds one; raise InputError for
    another folder."""
    if hub.is_name(name):
        return hub.fetch(name) / PUBLISHED, True
    path = bundled.find(addresses.place(name), folder)
    copies.pull(path, small_files)
    if is_gguf(path):
        from jaxlm.families.gguf.model import unpacked

        return unpacked(path) / PUBLISHED, True
    if not path.is_dir():
        return path, False
    file = RunPaths(path).config
    if not file.is_file() and is_published(path):
        return path / PUBLISHED, True
    if not file.is_file():
        raise InputError(f"{path} is a folder and no run: it holds no {file.name}; give a TOML file or a RUN")
    return file, True


def _read(path: Path) -> dict[str, Any]:
    """Return the keys of a file. Of a published model's config.json they are those of [model] alone."""
    if path.name != PUBLISHED:
        return _read_toml(path)
    from jaxlm.families.settings import model_of

    return {"model": model_of(read_json(path), str(path)).model_dump(mode="json", exclude_none=True)}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bundled.missing(path) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise InputError(f"{path} is not TOML that can be read: it has too many brackets in one another") from None
    except (OSError, ValueError) as error:  # no permission, not UTF-8, no name of a file
        raise InputError(f"{path} cannot be read: {error}") from None


def _published_execution(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the dtype of inference of a published model, and the form of its matrices that is kept."""
    from jaxlm.families import quantized

    dtype, form = config_dtype(config), quantized.quantization(config, where)
    execution: dict[str, Any] = {} if form is None else keys_of(form)
    return execution | ({"dtype": dtype} if dtype else {})


def _on_its_base(model: dict[str, Any], files: tuple[Path, ...], plugged: list[Plugin]) -> dict[str, Any]:
    """A [model] with what its `base` says, and the base of that; `files` led here. Plug-ins of bases are added."""
    if "base" not in model:
        return model
    source, is_record = _found(str(model["base"]), files[-1].parent)
    values = _read(source)
    base = values.get("model")
    if not isinstance(base, dict):
        raise InputError(f"{files[-1]}: model.base = {str(source)!r} has no section [model]")
    if source.resolve() in [file.resolve() for file in files]:
        raise InputError(f"{files[-1]}: model.base = {str(source)!r} leads back to itself")
    _import(values, source, is_record, plugged)
    changes = {key: value for key, value in model.items() if key != "base"}
    return merged(_on_its_base(base, (*files, source), plugged), changes)


def _set(values: dict[str, Any], override: str, example: str = "training.steps=100") -> None:
    key, equals, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not name or not all(sections):
        raise InputError(f"{override!r} is no override; write key=value, such as {example}")
    try:
        override.encode()
        document = tomllib.loads(f"value = {text}")
    except UnicodeEncodeError:
        raise InputError(f"{override!r} is not UTF-8; rename what it names") from None
    except RecursionError:
        raise InputError(f"{key}: its value has too many brackets in one another") from None
    except ValueError:
        document = {"value": text}  # a bare word is a string; so is a number of more digits than Python reads
    value = document.pop("value")
    if document:
        raise InputError(f"{override!r} sets more than {key}; give each key=value by itself")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise InputError(f"{key}: {section} is a value, not a section")
    table[name] = value


def _leave_other_kinds(values: dict[str, Any], file: dict[str, Any], keys: set[str]) -> None:
    """Drop the file's keys that only its `kind` knows from each section whose `kind` one of these overrides changed.

    (A file that names another `kind` than its base drops all keys of the base's section.)"""
    for key in keys:
        section, _, name = key.rpartition(".")
        before, now, sections = _at(file, section), _at(values, section), sections_at(section, Experiment)
        if name != "kind" or not sections or not all(isinstance(t.get("kind", ""), str) for t in (before, now)):
            continue
        known = {kind_of(s): s.model_fields.keys() for s in sections}
        was, is_now = (known.get(table.get("kind", kind_of(sections[0])), set()) for table in (before, now))
        for other in before.keys() & (was - is_now) if is_now else ():
            if not any(f"{given}.".startswith(f"{section}.{other}.") for given in keys):
                now.pop(other, None)


def _leave_other_length(values: dict[str, Any], keys: set[str]) -> None:
    """Drop the file's length of a run, in steps or epochs, where one of these overrides gives it by the other."""
    training, schedule = _at(values, "training"), _at(values, "optimizer.schedule")
    if "training.steps" in keys and "training.epochs" not in keys:
        training.pop("epochs", None)
    if "training.epochs" in keys and "training.steps" not in keys:
        steps = training.pop("steps", None)
        if steps is not None and "optimizer.schedule.decay_steps" not in keys and schedule.get("decay_steps") == steps:
            schedule.pop("decay_steps")  # which ends with the run


def _at(values: Any, section: str) -> dict[str, Any]:
    """The table of a dotted key; an empty one where there is none."""
    for part in section.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _fill(values: dict[str, Any]) -> set[str]:
    """The defaults of one section that come from another; their keys."""
    filled = set()
    for section in ("model", "training", "optimizer", "inference"):
        values.setdefault(section, {})
    if _has_preferences(values.get("data")):
        values.setdefault("dpo", {})
    model, training, optimizer = values.get("model"), values["training"], values["optimizer"]
    if isinstance(model, dict) and "context_length" in model:
        length = model["context_length"]
        for _, key in SIZE_KEYS.values():
            section, _, name = key.partition(".")
            if isinstance(values[section], dict) and name not in values[section]:
                longest = length, values[section].get("context")  # of the model; of the engine, in [inference]
                limits = [limit for limit in longest if isinstance(limit, int)]
                values[section][name] = min(*limits, DEFAULT_SEQUENCE) if limits else length
                filled.add(key)
    if isinstance(optimizer, dict):
        schedule = optimizer.setdefault("schedule", {})
        # A constant schedule, or one that is not known, does not decay.
        decays = isinstance(schedule, dict) and all("decay_steps" in s.model_fields for s in _schedules(schedule))
        if decays and isinstance(training, dict):
            steps = training.get("steps", DEFAULT_STEPS if training.get("epochs") is None else None)
            if "decay_steps" not in schedule and steps is not None:
                schedule["decay_steps"] = steps
                filled.add("optimizer.schedule.decay_steps")
    return filled


def _has_preferences(data: Any) -> bool:
    sources = data.get("sources") if isinstance(data, dict) else None
    given = [data, *(sources.values() if isinstance(sources, dict) else ())]
    return any(isinstance(table, dict) and table.get("preferences") is not None for table in given)


def _schedules(schedule: dict[str, Any]) -> tuple[type[Section], ...]:
    return chosen(OptimizerConfig.model_fields["schedule"].annotation, schedule)
