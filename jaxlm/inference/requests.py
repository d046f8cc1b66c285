"""A request to continue a prompt, its sampling options, and its check. Imports no JAX."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from jaxlm.core.errors import InputError
from jaxlm.inference.grammar import Grammar
from jaxlm.models.config import ModelConfig

# Bounds of what divides logits: beyond them, float32 overflows or all are alike.
_SMALLEST, _LARGEST = 1e-6, 1e6

MAX_BIASES = 300  # token ids of one request, as many as OpenAI's API takes
MAX_LOGPROBS = 20  # likeliest tokens beside the drawn one, as many as OpenAI's API gives

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # the numbers of 64 bits with a sign

_PLACES = 1 << 16  # of prompts, and of samples: both are in the 32 bits of a stream

# Writes an option's name as a message shows it before the value.
Named = Callable[[str], str]
_NAMED: Named = "{} =".format


class Sampling(NamedTuple):
    """Sampling from softmax(logits / temperature): among the `top_k` likeliest tokens, then among the fewest of these
    that hold `top_p` of the remaining probability (nucleus sampling; Holtzman et al. 2020, arXiv:1904.09751), then
    among those that are at least `min_p` times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082).

    Temperature 0 takes the likeliest token. None switches a filter off. Before all this, for temperature 0 too, logits
    are changed, in this order:

    - `repetition_penalty` divides the logits of tokens in the prompt or drawn before, and multiplies negative ones
      (Keskar et al. 2019, arXiv:1909.05858, section 4.1, with the sign as transformers and vLLM have it).
    - `frequency_penalty` is subtracted for each time that a token was drawn, and `presence_penalty` once.
    - `logit_bias` is added to the logits of its token ids.

    `logprobs` asks for the log-probability of the drawn token and of so many likeliest ones.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    @property
    def counts_tokens(self) -> bool:
        """Return whether sampling depends on the tokens before, by a penalty."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def check(self, named: Named = _NAMED) -> "Sampling":
        """Return itself. Raises InputError for values without meaning, under the names that `named` gives them."""
        if self.temperature != 0.0 and not _SMALLEST <= self.temperature <= _LARGEST:
            raise InputError(
                f"{named('temperature')} {self.temperature:g} must be 0, or from {_SMALLEST:g} to {_LARGEST:g}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"{named('top_k')} {self.top_k} must be 1 or more")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(f"{named('top_p')} {self.top_p:g} must be above 0 and at most 1")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise InputError(f"{named('min_p')} {self.min_p:g} must be from 0 to 1")
        if not _SMALLEST <= self.repetition_penalty <= _LARGEST:
            raise InputError(
                f"{named('repetition_penalty')} {self.repetition_penalty:g} must be from {_SMALLEST:g} to "
                f"{_LARGEST:g}; 1 is none"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= (penalty := getattr(self, name)) <= 2.0:
                raise InputError(f"{named(name)} {penalty:g} must be from -2 to 2")
        self._check_bias(named)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InputError(f"{named('logprobs')} {self.logprobs} must be from 0 to {MAX_LOGPROBS}")
        return self

    def _check_bias(self, named: Named) -> None:
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            raise InputError(f"{named('logit_bias')} {len(biases)} token ids must be at most {MAX_BIASES}")
        for token, bias in biases.items():
            if token < 0:
                raise InputError(f"{named('logit_bias')} {{{token}: {bias:g}}}: a token id must be 0 or more")
            if not -100.0 <= bias <= 100.0:
                raise InputError(f"{named('logit_bias')} {{{token}: {bias:g}}}: a bias must be from -100 to 100")


GREEDY = Sampling(temperature=0.0)


class Request(NamedTuple):
    """A prompt of token ids to continue, by at most `max_tokens` and up to the first of the `stop` strings.

    `stop_token_ids` end the continuation beside the tokenizer's, which end none with `ignores_stop_tokens`. Before
    `min_tokens` tokens are drawn no id ends the continuation, because none of these is drawn, and no stop string does.
    With `includes_stop` the text ends behind the stop string, or behind the text of the id, in place of before it. An
    answer (`is_answer`) is a text of its own, which does not continue the prompt's last word. Random numbers are those
    of the seed's `stream`, whatever other requests draw.

    A request asks for the log-probability of the token after each one of the prompt from the index `scores_from`
    on, and of the likeliest one in its place; with `ranks` for the token's rank and the `MAX_LOGPROBS` likeliest ones.
    After the last one of the prompt that token is `following`, where it is given. `hidden` asks for the stream that
    each token is drawn from.

    With a `grammar` the tokens are those of a text of the grammar, as long as `max_tokens` lets it become, and an id
    ends the text where the text fits the grammar. The text ends without an id where the grammar lets nothing follow.

    `adapter` is the name of one of the engine's adapters; None asks the model itself.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()
    stream: int = 0
    stop_token_ids: Collection[int] = ()
    ignores_stop_tokens: bool = False
    min_tokens: int = 0
    includes_stop: bool = False
    is_answer: bool = False
    scores_from: int | None = None
    following: int | None = None
    ranks: bool = False
    hidden: bool = False
    grammar: Grammar | None = None
    adapter: str | None = None

    def ending_ids(self, stop_token_ids: Collection[int]) -> frozenset[int]:
        """Return all ids that end the continuation; `stop_token_ids`: those of the model."""
        return frozenset((*self.stop_token_ids, *(() if self.ignores_stop_tokens else stop_token_ids)))

    @property
    def most_tokens(self) -> int:
        """The most tokens that are read: the last token is drawn and not read."""
        return len(self.prompt) + self.max_tokens - 1


def max_new_tokens(model: ModelConfig, prompt_tokens: int) -> int:
    """Return how many tokens fit into `model.context_length` after a prompt; the last one is drawn and never read."""
    return model.context_length - prompt_tokens + 1


def fitting_tokens(model: ModelConfig, prompt_tokens: int, most: int) -> int:
    """Return how many of at most `most` tokens fit into the context after a prompt: 1 where no token fits."""
    return min(most, max(max_new_tokens(model, prompt_tokens), 1))


class BarredTokens(NamedTuple):
    """Token ids that are not drawn at positions of a sequence before `until`."""

    ids: frozenset[int] = frozenset()
    until: int = 0


def check_seed(seed: int, named: Named = _NAMED) -> None:
    """Raise InputError for a seed that is no signed number of 64 bits."""
    if not MIN_SEED <= seed <= MAX_SEED:
        raise InputError(f"{named('seed')} {seed} must be from {MIN_SEED} to {MAX_SEED}")


def check_prompts(
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    named: Named = _NAMED,
) -> None:
    """Raise InputError for empty prompts, ids outside the vocabulary, or more tokens than `model.context_length`
    holds."""
    limit = f"{named('max_tokens')} {max_tokens}"
    if max_tokens < 1:
        raise InputError(f"{limit} must be 1 or more")
    if not prompts or not all(prompts):
        raise InputError("the prompt is empty; give at least one token")
    strange = next((t for prompt in prompts for t in prompt if not 0 <= t < model.vocab_size), None)
    if strange is not None:
        raise InputError(f"token id {strange} is outside the vocabulary, 0 to {model.vocab_size - 1}")
    longest = max(map(len, prompts))
    if longest > model.context_length:
        raise InputError(
            f"a prompt of {longest} tokens exceeds model.context_length = {model.context_length}; shorten it"
        )
    if max_tokens > (room := max_new_tokens(model, longest)):
        raise InputError(
            f"a prompt of {longest} tokens and {limit} exceed model.context_length = {model.context_length}; "
            f"at most {room} tokens can follow this prompt"
        )


def check_biases(model: ModelConfig, sampling: Sampling, named: Named = _NAMED) -> None:
    """Raise InputError for `logit_bias` of ids outside the vocabulary."""
    strange = next((token for token in sampling.logit_bias or () if token >= model.vocab_size), None)
    if strange is not None:
        raise InputError(
            f"{named('logit_bias')} {{{strange}: …}}: the id is outside the vocabulary, 0 to {model.vocab_size - 1}"
        )


def check_stop_tokens(model: ModelConfig, ids: Collection[int], named: Named = _NAMED) -> None:
    """Raise InputError for `stop_token_ids` outside the vocabulary."""
    strange = next((token for token in ids if not 0 <= token < model.vocab_size), None)
    if strange is not None:
        raise InputError(
            f"{named('stop_token_ids')} [{strange}]: this id is outside the vocabulary, 0 to {model.vocab_size - 1}"
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
    the streams of no other requests.

    Raises InputError as `check_prompts` does, naming the prompt if there are several, and for too many prompts or
    samples.
    """
    for count, name in ((len(prompts), "the number of prompts ="), (num_samples, named("num_samples"))):
        if not 1 <= count < _PLACES:
            raise InputError(f"{name} {count} must be from 1 to {_PLACES - 1:,}")
    requests = []
    for place, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True)):
        try:
            check_prompts(model, [prompt], limit, named=named)
        except InputError as error:
            raise error if len(prompts) == 1 else InputError(f"prompt {place + 1}: {error}") from None
        requests += [Request(prompt, limit, sampling, stop, place + _PLACES * sample) for sample in range(num_samples)]
    return requests
