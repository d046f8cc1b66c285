"""The experiment: every section of a TOML file."""

from pydantic import Field

from jaxlm.config.plugin_imports import PluginsConfig
from jaxlm.core import toml
from jaxlm.inference.config import InferenceConfig
from jaxlm.parallel.config import MeshConfig
from jaxlm.training.config import DecayingScheduleConfig, RunConfig


class Experiment(RunConfig, PluginsConfig):
    """One training run, whole: also how the devices are factored that it runs on, and the sizes of inference."""

    inference: InferenceConfig
    mesh: MeshConfig = Field(default_factory=MeshConfig)

    def to_toml(self) -> str:
        """Return every key with its value, unset ones as comments; it loads back to the same experiment."""
        return toml.to_toml(self)


def with_steps(experiment: Experiment, steps: int) -> Experiment:
    """Return an experiment whose training lasts so many steps, in place of `training.epochs`; a decay for which no end
    is given ends with them."""
    training = experiment.training.model_copy(update={"steps": steps, "epochs": None})
    optimizer, schedule = experiment.optimizer, experiment.optimizer.schedule
    if isinstance(schedule, DecayingScheduleConfig) and schedule.decay_steps is None:
        schedule = schedule.model_copy(update={"decay_steps": steps})
        optimizer = optimizer.model_copy(update={"schedule": schedule})
    return experiment.model_copy(update={"training": training, "optimizer": optimizer})
