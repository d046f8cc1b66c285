"""A request to continue a prompt, its sampling options, and its check. Imports no JAX."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.models.config import ModelConfig

# Bounds of the temperature: beyond them, divided logits overflow float32 or are all alike.
_COLDEST, _HOTTEST = 1e-6, 1e6

_PLACES = 1 << 16  # of prompts, and of samples: both are in the 32 bits of a stream

# Writes an option's name as a message shows it before the value.
Named = Callable[[str], str]
_NAMED: Named = "{} =".format


class Sampling(NamedTuple):
    """Sampling from softmax(logits / temperature): among the `top_k` likeliest tokens, then among the fewest of these
    that hold `top_p` of the remaining probability (nucleus sampling; Holtzman et al. 2020, arXiv:1904.09751).

    Temperature 0 takes the likeliest token. None switches a filter off.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self, named: Named = _NAMED) -> "Sampling":
        """Return itself. Raises InputError for values without meaning, under the names that `named` gives them."""
        if self.temperature != 0.0 and not _COLDEST <= self.temperature <= _HOTTEST:
            raise InputError(
                f"{named('temperature')} {self.temperature:g} must be 0, or from {_COLDEST:g} to {_HOTTEST:g}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"{named('top_k')} {self.top_k} must be 1 or more")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(f"{named('top_p')} {self.top_p:g} must be above 0 and at most 1")
        return self


class Request(NamedTuple):
    """A prompt of token ids to continue, by at most `max_tokens` and up to the first of the `stop` strings.

    Where it has `ends`, what follows is an answer: a text of its own, which these ids end beside the tokenizer's.
    Random numbers are those of the seed's `stream`, whatever else is drawn beside it.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()
    stream: int = 0
    ends: Collection[int] | None = None


def max_new_tokens(model: ModelConfig, prompt_tokens: int) -> int:
    """Return how many tokens fit into `model.context_length` after a prompt; the last one is drawn and never read."""
    return model.context_length - prompt_tokens + 1


def fitting_tokens(model: ModelConfig, prompt_tokens: int, most: int) -> int:
    """Return how many of at most `most` tokens fit into the context after a prompt: 1 where none does."""
    return min(most, max(max_new_tokens(model, prompt_tokens), 1))


def answer_tokens(model: ModelConfig, prompt_tokens: int, most: int) -> int:
    """Return `fitting_tokens` of an answer: where they are not `most`, a power of two, so that the turns of a
    conversation near the end of its context have few programs."""
    fitting = fitting_tokens(model, prompt_tokens, most)
    return most if fitting == most else 1 << (fitting.bit_length() - 1)


def max_prompt_tokens(model: ModelConfig, new_tokens: int) -> int:
    """Return the longest prompt that leaves room for `new_tokens` tokens: the inverse of `max_new_tokens`."""
    return model.context_length - new_tokens + 1


def check_seed(seed: int, named: Named = _NAMED) -> None:
    """Raise InputError for a seed that is no unsigned number of 32 bits."""
    if not 0 <= seed < 2**32:
        raise InputError(f"{named('seed')} {seed} must be from 0 to {2**32 - 1}")


def check_prompts(
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    pad_to: int = 0,
    named: Named = _NAMED,
) -> None:
    """Raise InputError for empty prompts, ids outside the vocabulary, or more tokens than `model.context_length`
    holds. A prompt that is padded to `pad_to` tokens counts as that long."""
    asked = f"{named('max_tokens')} {max_tokens}"
    if max_tokens < 1:
        raise InputError(f"{asked} must be 1 or more")
    if not prompts or not all(prompts):
        raise InputError("the prompt is empty; give at least one token")
    strange = next((t for prompt in prompts for t in prompt if not 0 <= t < model.vocab_size), None)
    if strange is not None:
        raise InputError(f"token id {strange} is outside the vocabulary, 0 to {model.vocab_size - 1}")
    longest = max(pad_to, *map(len, prompts))
    if longest > model.context_length:
        raise InputError(
            f"a prompt of {longest} tokens exceeds model.context_length = {model.context_length}; shorten it"
        )
    if max_tokens > (room := max_new_tokens(model, longest)):
        raise InputError(
            f"a prompt of {longest} tokens and {asked} exceed model.context_length = {model.context_length}; "
            f"at most {room} tokens can follow this prompt"
        )


def sampled(
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    num_samples: int,
    sampling: Sampling,
    stop: Sequence[str],
    named: Named = _NAMED,
) -> list[Request]:
    """Return the requests for `num_samples` continuations of the first prompt, then of the next.

    Args:
      max_tokens: the most tokens to follow each prompt.

    The stream of a request depends on the places of its prompt and sample alone: more prompts or more samples change
    none of the others.

    Raises InputError as `check_prompts` does, naming the prompt if there are several, and for too many of them.
    """
    for count, name in ((len(prompts), "the number of prompts ="), (num_samples, named("num_samples"))):
        if not 1 <= count < _PLACES:
            raise InputError(f"{name} {count} must be from 1 to {_PLACES - 1:,}")
    asked = []
    for place, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True)):
        try:
            check_prompts(model, [prompt], limit, named=named)
        except InputError as error:
            raise error if len(prompts) == 1 else InputError(f"prompt {place + 1}: {error}") from None
        asked += [Request(prompt, limit, sampling, stop, place + _PLACES * sample) for sample in range(num_samples)]
    return asked
