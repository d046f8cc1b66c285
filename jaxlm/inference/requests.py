"""What may be generated, and how tokens are drawn. Imports no JAX."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.models.config import ModelConfig

# Of temperatures: beyond these, logits divided by one overflow float32, or are all alike.
_COLDEST, _HOTTEST = 1e-6, 1e6


# How a message says the name of what was asked for, before its value.
Named = Callable[[str], str]
_NAMED: Named = "{} =".format


class Sampling(NamedTuple):
    """How a token is drawn: from softmax(logits / temperature) among the `top_k` likeliest, then among the fewest
    that hold `top_p` of what is left (nucleus sampling; Holtzman et al. 2020, arXiv:1904.09751).

    Temperature 0 takes the likeliest. None leaves a filter out.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self, named: Named = _NAMED) -> "Sampling":
        """Raises InputError for values that mean nothing, under the names that they were given by."""
        if self.temperature != 0.0 and not _COLDEST <= self.temperature <= _HOTTEST:
            raise InputError(
                f"{named('temperature')} {self.temperature:g} must be 0, or from {_COLDEST:g} to {_HOTTEST:g}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"{named('top_k')} {self.top_k} must be 1 or more")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(f"{named('top_p')} {self.top_p:g} must be above 0 and at most 1")
        return self


def room_behind(model: ModelConfig, tokens: int) -> int:
    """How many tokens `model.context_length` lets follow so many: the last of them is drawn, and not read."""
    return model.context_length - tokens + 1


def check_prompts(
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    fill_to: int = 0,
    named: Named = _NAMED,
) -> None:
    """Raises InputError for empty prompts, ids outside the vocabulary, or more tokens than `model.context_length`
    holds; prompts that are filled up to `fill_to` tokens are as long."""
    asked = f"{named('max_tokens')} {max_tokens}"
    if max_tokens < 1:
        raise InputError(f"{asked} must be 1 or more")
    if not prompts or not all(prompts):
        raise InputError("the prompt is empty; give at least one token")
    strange = next((t for prompt in prompts for t in prompt if not 0 <= t < model.vocab_size), None)
    if strange is not None:
        raise InputError(f"token id {strange} is outside the vocabulary, 0 to {model.vocab_size - 1}")
    longest = max(fill_to, *map(len, prompts))
    if longest > model.context_length:
        raise InputError(
            f"a prompt of {longest} tokens exceeds model.context_length = {model.context_length}; shorten it"
        )
    if max_tokens > (room := room_behind(model, longest)):
        raise InputError(
            f"a prompt of {longest} tokens and {asked} exceed model.context_length = {model.context_length}; "
            f"at most {room} tokens can follow this prompt"
        )
