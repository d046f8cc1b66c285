"""The name of the folder of a run that is given none."""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from jaxlm.config import load
from jaxlm.config.experiment import Experiment
from jaxlm.config.overrides import effective, overridden_values
from jaxlm.core import bundled
from jaxlm.core.moved_keys import former
from jaxlm.training.changes import is_free

# The name of a run folder: other characters, which a shell or a library may read as a pattern, and its longest part.
_UNSAFE = re.compile(r"[^\w.,=+-]", re.ASCII)
_LONGEST = 100


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
    by_former_key = sorted(overridden_values(overrides).items(), key=lambda item: former(item[0]))
    settings = {key: value for key, value in by_former_key if not is_free(key)}
    if getattr(experiment.optimizer.schedule, "decay_steps", None) == experiment.training.steps:
        length = ("training.steps", "training.epochs")
        settings |= {key: value for key, value in overridden_values(overrides).items() if key in length}
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
