"""The size of a step: its sequences and the tokens of each, and the keys that give them."""

from collections.abc import Iterable
from operator import attrgetter

from jaxlm.config.experiment import Experiment
from jaxlm.core.errors import InputError
from jaxlm.parallel.rules import Kind

# By kind of step: the key of its sequences, and that of the tokens of each.
SIZE_KEYS: dict[Kind, tuple[str, str]] = {
    "train": ("training.batch", "training.sequence"),
    "prefill": ("inference.sequences", "inference.prompt"),
    "decode": ("inference.sequences", "inference.length"),
}


def sizes(experiment: Experiment, kind: Kind) -> tuple[int, int]:
    """Return the sequences of a step, over the whole job, and the tokens of each."""
    batch, sequence = (attrgetter(key)(experiment) for key in SIZE_KEYS[kind])
    return batch, sequence


def refuse_other_sizes(keys: Iterable[str], kind: Kind | None) -> None:
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
