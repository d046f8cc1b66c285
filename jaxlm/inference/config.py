"""The section of an experiment that says how much inference does at once. Imports no JAX."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from jaxlm.core.schema import Count, InWords, Section
from jaxlm.core.units import parse_memory
from jaxlm.inference.settings import CacheDtype, EngineSettings, Speculation
from jaxlm.inference.step_shapes import TILE


def _memory(text: str) -> str:
    """Return the text of a size in memory. Raises ValueError for another text."""
    parse_memory(text)
    return text


def _speculation(text: str) -> str:
    """Return the text of a source of drafts. Raises ValueError for another text."""
    Speculation.parse(text)
    return text


Memory = Annotated[str, AfterValidator(_memory)]
_SIZE = InWords(default="inference.context or model.context_length, at most 8192")


class InferenceConfig(Section):
    """The sizes of inference: of the engine that generates, evaluates and serves, and of the steps that a plan counts.

    `acceptance`, `length` and `prompt` are of plans alone.
    """

    sequences: Count = EngineSettings.slots
    """The most sequences that are under way; in a plan, those of its step."""
    context: Annotated[Count | None, InWords(default="the model's, or what the cache holds")] = EngineSettings.context
    """The most tokens of a sequence."""
    page: Annotated[Count, Field(multiple_of=TILE)] = EngineSettings.page
    """Tokens of a page of the cache, a multiple of 32."""
    state_interval: Annotated[Count | None, InWords(default="512, in whole pages")] = EngineSettings.state_interval
    """Of recurrent layers, the tokens between states that stay in the cache for texts which begin alike, a multiple of
    the page; beside these, states stay where texts and their prompts end."""
    chunk_tokens: Count = EngineSettings.chunk_tokens
    """The most tokens of prompts in a step on each device, rounded up to whole tiles of 32."""
    cache_memory: Annotated[
        Memory | None, InWords(default="1GiB on a CPU, 80 % of what is free elsewhere", type='size, such as "8GiB"')
    ] = None
    """Memory of keys and values on each device; where it holds fewer than all sequences could need, some wait."""
    cache_dtype: Annotated[CacheDtype | None, InWords(default="float32 on a CPU, execution.dtype elsewhere")] = None
    """Keys and values in eight bits, those of a token's head times a scale: the cache takes a quarter to half of the
    memory, and texts differ a little."""
    speculate: Annotated[
        Annotated[str, AfterValidator(_speculation)] | None,
        InWords(default="none", type='source of drafts, such as "ngram:4"'),
    ] = None
    """Drafts of next tokens, which a step reads before they are drawn: `ngram` looks them up in the text, and a model
    of the same tokens draws them; `:N` is the most of a sequence in a step. They change no text."""
    steps_per_dispatch: Annotated[
        Count | None, InWords(default="in servers and bench what takes about 20 ms, at most 8; else 1")
    ] = None
    """Decoding steps that one program runs where no request waits, so that the host is asked less often: tokens come in
    so many at a time, and a new request waits for them. They change no text."""
    acceptance: Annotated[float, Field(ge=0, le=1)] = 0.6
    """In a plan, the probability that a draft is right where those before it are."""
    length: Annotated[Count, _SIZE]
    """Tokens that each sequence holds in a plan of decoding."""
    prompt: Annotated[Count, _SIZE]
    """Tokens of each prompt in a plan of prefill."""

    def settings(self, **more: Any) -> EngineSettings:
        """Return the settings of an engine of these sizes, with `more` of its settings."""
        cache_bytes = None if self.cache_memory is None else parse_memory(self.cache_memory)
        return EngineSettings(
            context=self.context,
            slots=self.sequences,
            cache_bytes=cache_bytes,
            cache_dtype=self.cache_dtype,
            page=self.page,
            state_interval=self.state_interval,
            chunk_tokens=self.chunk_tokens,
            speculation=Speculation.parse(self.speculate) if self.speculate else None,
            steps_per_dispatch=self.steps_per_dispatch,
            **more,
        )


# The keys that an engine reads, in their order: all but those of plans.
ENGINE_KEYS = tuple(key for key in InferenceConfig.model_fields if key not in ("acceptance", "length", "prompt"))
