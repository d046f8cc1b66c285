"""Generation: prefill once, then decode token by token."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.inference import steps
from jaxlm.inference.cache import DenseCache, cache_shardings, empty_cache
from jaxlm.inference.requests import Sampling, check_biases, check_prompts
from jaxlm.inference.sampling import RowSampling, check_drawn, count_drawn, count_prompt, row_sampling, sample
from jaxlm.models.config import Kernels, ModelConfig
from jaxlm.models.kernels import using_kernels
from jaxlm.models.tree import Tree, abstract
from jaxlm.parallel.partition import named_sharding, replicated, using_rules
from jaxlm.parallel.rules import DECODE, PREFILL


def generate(
    model: ModelConfig,
    parameters: Tree,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    mesh: Mesh,
    *,
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    seed: int = 0,
    streams: Sequence[int] | None = None,
    known: np.ndarray | None = None,
    pad_to: int = 0,
    kernels: Kernels = "auto",
) -> Iterator[np.ndarray]:
    """Yield up to `max_tokens` times the next token id of every prompt, int32 [B], as they are drawn.

    A prompt's tokens do not depend on the others: each is sampled by its own options, with random numbers of the seed,
    its stream and the token's position.

    Args:
      parameters: on `mesh`, in the dtype to compute in, which is also the cache's.
      sampling: of all prompts, or of each.
      streams: a number of 32 bits per prompt; 0, 1, … where none are given.
      known: bool [V], whether an id has a token (`Tokenizer.known`); others are never drawn. None where all have.
      pad_to: prompts are padded to the longest, or to so many tokens: batches of equal size and padded length run the
        same programs again.
      kernels: `training.kernels`.

    Raises InputError as `check_prompts` and `check_biases` do, for options that ask for log-probabilities, and where
    logits are not finite.
    """
    check_prompts(model, prompts, max_tokens, pad_to)
    options = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    for option in options:
        check_biases(model, option)
        if option.logprobs is not None:
            raise InputError(f"logprobs = {option.logprobs}: these texts have no log-probabilities; leave it out")
    longest, batch = max(pad_to, *map(len, prompts)), len(prompts)
    dtype = jax.tree.leaves(parameters)[0].dtype
    start, step = programs(model, batch, longest + max_tokens - 1, dtype, mesh, kernels)

    padded = np.zeros((batch, longest), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    how = row_sampling(options, seed, streams)
    known_V = jax.device_put(np.ones(model.vocab_size, bool) if known is None else known, replicated(mesh))
    counting = any(option.counts_tokens for option in options)
    counts = np.zeros((batch, model.vocab_size), np.int32) if counting else None
    with jax.set_mesh(mesh):
        tokens, cache, counts = start(parameters, padded, length, how, known_V, counts)
    yield check_drawn(np.asarray(tokens))
    for _ in range(max_tokens - 1):
        with jax.set_mesh(mesh):  # not across a yield: the caller must not find a mesh set
            tokens, cache, counts = step(parameters, tokens, cache, how, known_V, counts)
        yield check_drawn(np.asarray(tokens))


@lru_cache(maxsize=8)
def programs(
    model: ModelConfig,
    batch: int,
    size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    kernels: Kernels = "auto",
) -> tuple[Callable, Callable]:
    """Return the jitted steps (prefill, decode), to be called under `jax.set_mesh`.

    prefill(parameters, tokens [B, T], length [B], RowSampling, known [V], counts) reads prompts into a cache of `size`
    tokens each and draws the first tokens [B]; decode(parameters, tokens [B], cache, RowSampling, known [V], counts)
    reads these and draws the next ones, and consumes the cache and counts that it was given. Both return tokens, cache
    and counts [B, V] (`count_prompt`), of no tokens at first, or None where no row has a penalty. One program serves
    all tokenizers, and all options: two with penalties.
    """
    graph, _ = abstract(model)
    cache_placement = cache_shardings(model, batch, size, mesh)
    rows = named_sharding(("batch",), (batch,), mesh, DECODE)
    counted = named_sharding(("batch", "act_vocab"), (batch, model.vocab_size), mesh, DECODE)

    @using_rules(PREFILL)
    @using_kernels(kernels)
    def first_token(
        parameters: Tree,
        tokens: jax.Array,
        length: jax.Array,
        how: RowSampling,
        known: jax.Array,
        counts: jax.Array | None,
    ) -> tuple:
        cache = empty_cache(model, batch, size, dtype)
        logits, cache = steps.prefill(graph, parameters, tokens, length, cache)
        if counts is not None:
            is_given = jnp.arange(tokens.shape[1])[None] < length[:, None]
            counts = count_prompt(counts, jnp.arange(batch)[:, None], jnp.where(is_given, tokens, model.vocab_size))
        return drawn(logits, how, cache, known, counts)

    @using_rules(DECODE)
    @using_kernels(kernels)
    def next_token(
        parameters: Tree,
        tokens: jax.Array,
        cache: DenseCache,
        how: RowSampling,
        known: jax.Array,
        counts: jax.Array | None,
    ) -> tuple:
        logits, cache = steps.decode_step(graph, parameters, tokens, cache)
        return drawn(logits, how, cache, known, counts)

    def drawn(
        logits: jax.Array, how: RowSampling, cache: DenseCache, known: jax.Array, counts: jax.Array | None
    ) -> tuple:
        tokens = sample(logits, how, cache.length, known, counts).token
        return tokens, cache, None if counts is None else count_drawn(counts, jnp.arange(batch), tokens)

    jit = partial(jax.jit, out_shardings=(rows, cache_placement, counted))
    return jit(first_token), jit(next_token, donate_argnums=(2, 5))
