"""Profiles of chosen steps, for XProf. Operations carry the paths of the abstract tree."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.errors import InputError


class ProfiledSteps(NamedTuple):
    """The steps start, …, stop − 1, numbered as in the lines of metrics."""

    start: int
    stop: int

    @staticmethod
    def parse(text: str) -> "ProfiledSteps":
        """Parse START:STOP. Raises InputError."""
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if match is None or not 0 < int(match[1]) < int(match[2]):
            raise InputError(f"--profile {text!r} is not START:STOP with 0 < START < STOP, such as 10:13 for 10 to 12")
        return ProfiledSteps(int(match[1]), int(match[2]))

    def check(self, last: int) -> "ProfiledSteps":
        """Return itself. Raises InputError if the run ends, with step `last`, before these steps begin."""
        if self.start > last:
            raise InputError(f"--profile {self.start}:{self.stop} begins after training.steps = {last}; lower START")
        return self


class Profiler:
    """A profiler that traces `steps` into a folder; each of several processes has a subfolder. With `steps=None` it
    does nothing."""

    def __init__(self, steps: ProfiledSteps | None, directory: Path, say: Callable[[str], None]):
        self._steps, self._directory, self._say, self._tracing = steps, directory, say, False

    def resume(self, step: int) -> None:
        """Report if the run resumes after the profiled steps. This is no error: a job may be restarted with the same
        command."""
        if self._steps is not None and self._steps.stop <= step + 1:
            self._say(f"no profile: steps {self._steps.start} to {self._steps.stop - 1} are done, up to {step}")

    def before(self, step: int, settle: Callable[[], None]) -> None:
        """Start or stop the trace; to be called before each step is dispatched. `settle` waits for earlier steps."""
        if self._steps is None:
            return
        if self._tracing and step >= self._steps.stop:
            settle()
            self.close()
        elif not self._tracing and self._steps.start <= step < self._steps.stop:
            import jax

            settle()
            own = (
                f"process-{jax.process_index()}" if jax.process_count() > 1 else ""
            )  # else the processes of a host overwrite one another
            jax.profiler.start_trace(self._directory / own)
            self._tracing = True

    def close(self) -> None:
        """Write the current trace, if there is one."""
        if self._tracing:
            import jax

            self._tracing, self._steps = False, None
            jax.profiler.stop_trace()
            self._say(f"profile written; to see it: xprof --logdir {self._directory}")
