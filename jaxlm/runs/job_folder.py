"""RUN as the job that trains in it: whether the job may, and what it writes there."""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxlm.config.defaults import resolved
from jaxlm.config.experiment import Experiment
from jaxlm.core import addresses, copies
from jaxlm.core.errors import InputError
from jaxlm.core.files import building, leftovers, replace, replacing, unwritable
from jaxlm.core.moved_keys import FORMER_DEFAULTS
from jaxlm.core.schema import Change
from jaxlm.data.dataset import Dataset
from jaxlm.parallel.processes import is_first
from jaxlm.runs.folder import Run
from jaxlm.training.changes import bound, changed_keys, is_by_content, is_free
from jaxlm.training.origin import Origin
from jaxlm.training.records import JsonLines

_OTHER_OUT = "choose another --out"
_CONTINUE = "--continue-with-changes"
_WAYS_OUT = f"{_OTHER_OUT}, or go on in this one with {_CONTINUE}"
_DECAY_STEPS = "optimizer.schedule.decay_steps"


class JobFolder(Run):
    """The folder of a run as one job has it: the checks before it starts, and the records of what it trains."""

    def with_former_defaults(self, experiment: Experiment) -> Experiment:
        """Return the experiment with the defaults that the run in the folder was begun with, of an earlier version,
        where the experiment gives no other value. Raises InputError where the run cannot be read."""
        before = self.experiment() if self.paths.config.exists() else experiment
        for section, _, name in (key.partition(".") for key in FORMER_DEFAULTS):
            recorded, now = (getattr(each, section) for each in (before, experiment))
            if name not in now.model_fields_set and getattr(recorded, name) == FORMER_DEFAULTS[f"{section}.{name}"]:
                experiment = experiment.model_copy(
                    update={section: now.model_copy(update={name: getattr(recorded, name)})}
                )
        return experiment

    def check(
        self, experiment: Experiment, continue_with_changes: bool = False, origin: Origin | None = None
    ) -> list[Change]:
        """Return the keys whose values differ from those that the run in the folder was trained with.

        Raises InputError where the folder is none of ours or cannot be made, where its run has lost its checkpoints or
        began with other weights than `origin`, or where it was trained as another experiment: unless
        `continue_with_changes`, if its checkpoints go with the new one.
        """
        self.paths.check_name()
        if self.paths.config.exists():
            before = self.experiment()
            if self.is_imported:
                raise InputError(
                    f"{self.paths} holds imported weights, in which no training continues; start from them: "
                    f"--from {self.paths}, with another --out"
                )
            self.digest()
            self._check_origin(origin)
            self._check_checkpoints(before.checkpoint.every)
            changed = changed_keys(before, experiment)
            if refused := bound(before, experiment):
                raise InputError(f"{self.trained_with(refused)}, which its checkpoints are bound to; {_OTHER_OUT}")
            others = [change for change in changed if not is_free(change.key) and not is_by_content(change.key)]
            if others and not continue_with_changes:
                if [change.key for change in others] == [_DECAY_STEPS] and _ends_with_steps(before, experiment):
                    raise self._other_end(before, experiment)
                raise InputError(f"{self.trained_with(others)}; {_WAYS_OUT}")
            return changed
        try:
            # What a start leaves that was cut short.
            paths = self.paths
            ours = {paths.lock, paths.tokenizer, paths.data, paths.origin, paths.huggingface, paths.elastic}
            ours.update(leftovers(paths.directory))
            there = self.paths.directory.exists()
            usable = set(self.paths.directory.iterdir()) <= ours if there else not unwritable(self.paths.directory)
        except OSError:
            usable = False
        if not usable:
            raise InputError(f"{self.paths} is there and is no run, or cannot be made; {_OTHER_OUT}")
        return []

    def _other_end(self, before: Experiment, now: Experiment) -> InputError:
        """Return the error for other steps under a schedule that ends with them, with what goes on with that."""
        resume = f"jaxlm train {shlex.quote(str(self.paths))}"
        return InputError(
            f"the schedule of {self.paths} ends at step {before.training.steps}, and {_DECAY_STEPS} follows from "
            f"training.steps, which is {now.training.steps} now: `{resume} training.steps={now.training.steps}` keeps "
            f"the schedule, {_CONTINUE} lets it end at step {now.training.steps}; or {_OTHER_OUT}"
        )

    def _check_origin(self, given: Origin | None) -> None:
        begun = self.begun_from
        if given is not None and (begun is None or begun.source != given.source):
            before = "weights of its own" if begun is None else f"the weights of {begun.source}"
            raise InputError(
                f"{self.paths} began with {before}, not with those of {given.source}; leave out --from, or {_OTHER_OUT}"
            )

    def _check_checkpoints(self, every: int) -> None:
        """Raise InputError where the run has lost its checkpoints, as on a disk that is away: it would begin anew, and
        overwrite its records."""
        steps = [row["step"] for row in JsonLines(self.paths.metrics).rows()]
        lost = bool(steps) and not self.paths.checkpoints.is_dir()  # there before the first line
        # The second checkpoint is begun once the first is whole.
        lost |= max(steps, default=0) > 2 * every and not self.has_checkpoint
        if lost:
            raise InputError(
                f"{self.paths.checkpoints} has no checkpoint, though {self.paths.metrics.name} has {max(steps)} steps; "
                "put it back, or choose another --out"
            )

    def open(
        self,
        experiment: Experiment,
        dataset: Dataset,
        continue_with_changes: bool = False,
        origin: Origin | None = None,
        sidecar_files: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        """Make the folder, or continue it with the same data. The configuration comes last: it makes it a run.
        In a job of several processes the first writes, and the others, after it, look.

        Args:
          origin: of the weights that a new run begins with.
          sidecar_files: returns the small files that these came with.

        Raises InputError where another job has the folder, where the run was trained on other data and may not
        `continue_with_changes` or has another tokenizer, or where another process of this job does not see the folder.
        """
        if is_first():
            self.paths.directory.mkdir(parents=True, exist_ok=True)
            self.claim()
            for killed in leftovers(self.paths.directory):
                shutil.rmtree(killed) if killed.is_dir() else killed.unlink()
        elif not self.paths.config.exists():
            remedy = "choose an --out that all share"
            if addresses.address(self.paths.directory) is not None:
                remedy = "set XDG_CACHE_HOME to a folder that all share, where the copies of buckets are"
            raise InputError(f"{self.paths} is not there for every process; {remedy}")
        if not self.paths.config.exists():
            self._save_tokenizer(dataset)
            self._save_data(dataset)
            self._save_origin(origin, sidecar_files())
        elif self.digest() != dataset.digest:
            self._check_data(experiment, dataset, continue_with_changes)
        if is_first():
            if not self.paths.tokenizer.is_file():
                self._save_tokenizer(dataset)
            if not self.paths.config.exists():
                replace(self.paths.config, experiment.to_toml())

    def _check_data(self, experiment: Experiment, dataset: Dataset, continue_with_changes: bool) -> None:
        """Raise InputError where a run cannot, or may not, go on with other data."""
        if not continue_with_changes:
            changed = [c for c in changed_keys(self.experiment(), experiment) if is_by_content(c.key)]
            other = f"{self.paths} was trained with other text, sources or tokenizer than [data] gives now"
            raise InputError(f"{self.trained_with(changed) if changed else other}; {_WAYS_OUT}")
        if self.paths.tokenizer.is_file() and self.load_tokenizer().to_json() != dataset.tokenizer.to_json():
            raise InputError(
                f"{self.paths} was trained with another tokenizer; set data.tokenizer={self.paths.tokenizer}, or "
                f"{_OTHER_OUT}"
            )

    def record(self, experiment: Experiment, dataset: Dataset, step: int) -> None:
        """Record, once a step is trained, that it and those after it have this configuration and data.

        In a job of several processes the first one writes.
        """
        if not is_first():
            return
        # Later ones are trained anew.
        rows = [row for row in JsonLines(self.paths.history).rows() if row["step"] < step]
        if not rows and step > 1:  # begun before there was a history
            rows = [{"step": 1, "data": self.digest(), "config": self.experiment().model_dump(mode="json")}]
        now = {"step": step, "data": dataset.digest, "config": experiment.model_dump(mode="json")}
        if not rows or {**rows[-1], "step": step, "config": resolved(rows[-1]["config"])} != now:
            rows.append(now)
        JsonLines(self.paths.history).replace(rows)
        self._save_data(dataset)
        replace(self.paths.config, experiment.to_toml())

    def _save_data(self, dataset: Dataset) -> None:
        values = {"digest": dataset.digest, "held_out_bytes": dataset.held_out_bytes}
        replace(self.paths.data, json.dumps(values))

    def _save_origin(self, origin: Origin | None, sidecar_files: Mapping[str, bytes]) -> None:
        self.paths.origin.unlink(missing_ok=True)  # of a start that was cut short, as the folder
        shutil.rmtree(self.paths.huggingface, ignore_errors=True)
        for stale in (self.paths.origin, self.paths.huggingface) if is_first() else ():
            copies.delete(stale)
        if origin is not None:
            origin.save(self.paths.origin)
        if sidecar_files:
            write_files(sidecar_files, self.paths.huggingface)

    def _save_tokenizer(self, dataset: Dataset) -> None:
        with replacing(self.paths.tokenizer) as partial:
            dataset.tokenizer.save(partial)


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a new folder, all or none."""
    with building(folder) as partial:
        for name, content in files.items():
            (partial / name).write_bytes(content)


def _ends_with_steps(*experiments: Experiment) -> bool:
    """Return whether the schedule of each experiment ends with its last step, as where no end is given."""
    return all(
        getattr(each.optimizer.schedule, "decay_steps", None) == each.training.steps is not None for each in experiments
    )
