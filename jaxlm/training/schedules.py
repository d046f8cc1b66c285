"""Learning-rate schedules."""

import optax

from jaxlm.core.errors import InputError
from jaxlm.training.config import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    DecayingScheduleConfig,
    LinearScheduleConfig,
    ScheduleConfig,
    WarmupStableDecayScheduleConfig,
)
from jaxlm.training.promotion import promoting


def schedule(settings: ScheduleConfig, peak: float) -> optax.Schedule:
    """Return the learning rate as a function of the number of updates made so far."""
    warmup = optax.linear_schedule(0.0, peak, settings.warmup_steps)
    return promoting(optax.join_schedules([warmup, _after_warmup(settings, peak)], [settings.warmup_steps]))


def _after_warmup(settings: ScheduleConfig, peak: float) -> optax.Schedule:
    match settings:
        case CosineScheduleConfig():
            return optax.cosine_decay_schedule(peak, _left(settings), alpha=settings.final_fraction)
        case LinearScheduleConfig():
            return optax.linear_schedule(peak, peak * settings.final_fraction, _left(settings))
        case WarmupStableDecayScheduleConfig():
            left = _left(settings)
            decay = min(max(round(settings.decay_fraction * _end(settings)), 1), left)
            return optax.linear_schedule(peak, peak * settings.final_fraction, decay, transition_begin=left - decay)
        case ConstantScheduleConfig():
            return optax.constant_schedule(peak)
    raise TypeError(f"no schedule {settings!r}")


def _end(settings: DecayingScheduleConfig) -> int:
    if settings.decay_steps is None:
        raise InputError(
            "the steps of training.epochs follow from its text, which is not read here; set training.steps"
        )
    return settings.decay_steps


def _left(settings: DecayingScheduleConfig) -> int:
    """Return the number of updates from the end of the warm-up to the end, at least 1 if the run ends inside it."""
    return max(_end(settings) - settings.warmup_steps, 1)
