"""The experiment, composed, resolved and checked before JAX starts."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxlm.config.checks import check_context, check_experiment, check_new_tokenizer, check_state_interval
from jaxlm.config.defaults import fill_defaults
from jaxlm.config.experiment import Experiment
from jaxlm.config.files import configuration_file, published_execution, read_values, with_base
from jaxlm.config.overrides import assign, leave_other_kinds, leave_other_length, overridden, overridden_values
from jaxlm.config.plugin_imports import import_plugins, installed_plugins
from jaxlm.config.step_sizes import refuse_other_sizes
from jaxlm.core import plugins
from jaxlm.core.errors import InputError
from jaxlm.core.explain import explain
from jaxlm.core.moved_keys import with_present_keys
from jaxlm.core.plugins import Plugin
from jaxlm.core.schema import NONE, without_none
from jaxlm.families.files import CONFIG as PUBLISHED
from jaxlm.families.files import read_json
from jaxlm.parallel.rules import Kind
from jaxlm.training.paths import RunPaths


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
    path, is_record = configuration_file(path)
    values, plugged = read_values(path), list[Plugin]()
    import_plugins(values, path, is_record, plugged)
    if path.name == PUBLISHED and kind in ("prefill", "decode"):
        values["execution"] = published_execution(read_json(path), str(path))
    is_run = RunPaths(path.parent).are_of_a_run and path.name == RunPaths(path.parent).config.name
    if is_run:
        values = with_present_keys(values)
    if isinstance(values.get("model"), dict):
        values["model"] = with_base(values["model"], (path,), plugged)
    if model is not None:
        values.setdefault("model", model)
    if tokenizer is not None and isinstance(values.setdefault("data", {}), dict):
        values["data"].setdefault("tokenizer", tokenizer)
    file, overrides = copy.deepcopy(values), list(overrides)
    has_model = "model" in values
    for override in overrides:
        assign(values, override)
    if "import" in overridden(overrides):
        raise InputError("import names plug-ins in a file; here give --import MODULE")
    values["import"] = [*dict.fromkeys(map(str, (*plugged, *plugins.of_command())))]
    refuse_other_sizes(overridden(overrides), kind)
    leave_other_kinds(values, file, set(overridden(overrides)))
    values = without_none(values, [Experiment])
    leave_other_length(values, {key for key, value in overridden_values(overrides).items() if value != NONE})
    filled = fill_defaults(values)
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
    check_experiment(experiment, kind)
    if not is_run or "inference.context" in overridden(overrides):  # earlier versions took the model's in its place
        check_context(experiment)
    check_state_interval(experiment)
    if kind == "train" and not is_run and path.name != PUBLISHED:  # which have a tokenizer, or need none
        check_new_tokenizer(experiment)
    if installed := installed_plugins(experiment):
        named = [*dict.fromkeys((*values["import"], *map(str, installed)))]
        return experiment.model_copy(update={"import": tuple(named)})
    return experiment
