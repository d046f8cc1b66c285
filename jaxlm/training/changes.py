"""Keys that a run may change when it is resumed, and those that make it another run. Imports no JAX."""

from fnmatch import fnmatchcase

from jaxlm.core.schema import Change, changes
from jaxlm.training.config import RunConfig

# Keys, and sections, that change no trained step, or no more than its rounding. More steps are among them: a schedule
# that ends with them has `optimizer.schedule.decay_steps`, which is not. Every key that is in neither list, also one
# that is yet to be added, makes another run.
_FREE = (
    *("import", "evaluation.*", "checkpoint.*", "records.*", "mesh.*", "inference.*"),
    *(f"execution.{name}" for name in ("remat", "scan_layers", "kernels", "deterministic", "compiler_options*")),
    *("execution.context_parallel", "execution.expert_parallel", "execution.pipeline_*"),
    *(f"training.{name}" for name in ("steps", "epochs", "log_every", "max_skipped_in_a_row", "microbatches")),
    *("data.cache", "data.max_broken", "data.if_missing", "data.sources.*.if_missing"),
)
# Keys of paths: what is found there makes a run, and `jaxlm.runs` compares that.
_BY_CONTENT = (
    *("data.text", "data.chat", "data.validation", "data.chat_template", "data.tokenizer"),
    *("data.sources.*.text", "data.sources.*.chat", "data.sources.*.validation"),
)
# Keys, and sections, that the parameters are bound to; the other keys of [model] may differ where they are used.
_ARCHITECTURE = tuple(
    f"model.{name}"
    for name in (
        *("vocab_size", "num_layers", "d_model", "norm", "attention", "feed_forward", "pattern"),
        *("position.kind", "position.fraction", "position.reversed"),
        *("norm_placement", "residual", "residual_scale", "tied_embeddings", "embedding_scale"),
        *("embedding_norm", "logit_scale", "logit_soft_cap"),
    )
)


def changed_keys(before: RunConfig, now: RunConfig) -> list[Change]:
    """Return the keys that differ, in alphabetical order."""
    return list(changes(before.model_dump(mode="json"), now.model_dump(mode="json")))


def is_free(key: str) -> bool:
    """Return whether a key changes no trained step, or no more than its rounding."""
    return any(fnmatchcase(key, free) for free in _FREE)


def is_by_content(key: str) -> bool:
    """Return whether a key is a path, of which the content decides."""
    return any(fnmatchcase(key, path) for path in _BY_CONTENT)


def architecture(before: RunConfig, now: RunConfig) -> list[Change]:
    """Return the changes that make the parameters those of another model."""
    learned = ("model.context_length",) if before.model.position.kind == "learned" else ()
    keys = (*_ARCHITECTURE, *learned)
    return [change for change in changed_keys(before, now) if _is_under(change.key, keys)]


def bound(before: RunConfig, now: RunConfig) -> list[Change]:
    """Return the changes that no checkpoint can be continued with: of the architecture, the optimizer's kind, the
    shapes of adapters, or an average of the weights or replicas (`local_sgd`) that begin or end in the middle."""
    others = [
        change
        for change in changed_keys(before, now)
        if change.key in ("optimizer.kind", "lora", "lora.rank", "lora.targets")
        or (change.key in ("training.ema_decay", "training.local_sgd") and None in change[1:])
    ]
    return architecture(before, now) + others


def _is_under(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)
