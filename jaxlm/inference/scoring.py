"""Log-likelihoods of given continuations after their contexts, in batches of few shapes."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.models.config import Kernels, ModelConfig
from jaxlm.models.kernels import using_kernels
from jaxlm.models.positions import cache_causal_mask
from jaxlm.models.tree import Tree, abstract
from jaxlm.parallel.batches import put_batch
from jaxlm.parallel.partition import replicated, using_rules
from jaxlm.parallel.rules import PREFILL
from kernels_pallas.linear_cross_entropy.xla import cross_entropy

_SHORTEST = 32


class Score(NamedTuple):
    """`logprob`: ln p(continuation | context). `greedy`: each token of the continuation is the likeliest after the
    tokens before it. `truncated`: the context lost its beginning."""

    logprob: float
    greedy: bool
    truncated: bool


def token_logprobs(
    graph: nnx.GraphDef,
    parameters: Tree,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    length_B: jax.Array,
    known_V: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return ln p of each target after its prefix, float32 [B, T], and whether it is the likeliest, bool [B, T].

    Args:
      graph: the module's graph, from `models.tree.abstract`.
      parameters: in the dtype to compute in.
      tokens_BT, targets_BT: int32, padded on the right.
      length_B: int32 tokens of each row without padding.
      known_V: bool, whether an id has a token; others keep their probability, and are never the
        likeliest. None where all have.
    """
    module = nnx.merge(graph, parameters)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    hidden_BTD, _, _ = module.hidden(tokens_BT, positions_BT, cache_causal_mask(positions_BT, length_B))
    logits_BTV = module.logits(hidden_BTD)
    losses_BT, _ = cross_entropy(logits_BTV, targets_BT)
    if known_V is not None:
        logits_BTV = jnp.where(known_V[None, None], logits_BTV, -jnp.inf)
    return -losses_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT


def padded_length(tokens: int, longest: int) -> int:
    """Return the power of two that holds `tokens`, at most `longest`: few lengths are few programs to compile."""
    return min(longest, max(_SHORTEST, 1 << (tokens - 1).bit_length()))


class Scorer:
    """A scorer of continuations under one model, `batch` at a time on a mesh.

    `known`: bool [V], whether an id has a token (`Tokenizer.known`); None where all have.
    """

    def __init__(
        self,
        model: ModelConfig,
        parameters: Tree,
        batch: int,
        mesh: Mesh,
        known: np.ndarray | None = None,
        kernels: Kernels = "auto",
    ):
        graph, _ = abstract(model)
        self._context, self._parameters, self._batch, self._mesh = model.context_length, parameters, batch, mesh
        self._known = jax.device_put(np.ones(model.vocab_size, bool) if known is None else known, replicated(mesh))
        logprobs = using_rules(PREFILL)(using_kernels(kernels)(partial(token_logprobs, graph)))
        self._logprobs = jax.jit(logprobs, out_shardings=replicated(mesh))

    def __call__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[int, Score]]:
        """Yield the index and Score of each (context, continuation) of token ids, the longest first.

        A pair of more than `model.context_length` + 1 tokens loses the beginning of its context. Raises InputError for
        a context or continuation without tokens, and for a continuation longer than `model.context_length`.
        """
        for context, continuation in pairs:
            _check(context, continuation, self._context)
        rows = [np.array([*context, *continuation], np.int32)[-self._context - 1 :] for context, continuation in pairs]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        for first in range(0, len(order), self._batch):
            chosen = order[first : first + self._batch]
            logprobs, likeliest = self._run([rows[i] for i in chosen])
            for at, i in enumerate(chosen):
                end = len(rows[i]) - 1
                scored = slice(end - len(pairs[i][1]), end)
                logprob, greedy = logprobs[at, scored].sum(dtype=np.float64), likeliest[at, scored].all()
                yield i, Score(float(logprob), bool(greedy), truncated=sum(map(len, pairs[i])) > len(rows[i]))

    def _run(self, rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        length = padded_length(max(map(len, rows)) - 1, self._context)
        batch = {name: np.zeros((self._batch, length), np.int32) for name in ("tokens", "targets")}
        batch["lengths"] = lengths = np.zeros(self._batch, np.int32)
        for at, row in enumerate(rows):
            batch["tokens"][at, : len(row) - 1], batch["targets"][at, : len(row) - 1] = row[:-1], row[1:]
            lengths[at] = len(row) - 1
        with jax.set_mesh(self._mesh):
            placed = put_batch(batch, self._mesh, PREFILL)
            return jax.device_get(self._logprobs(self._parameters, *placed.values(), self._known))


def _check(context: Sequence[int], continuation: Sequence[int], longest: int) -> None:
    if not context or not continuation:
        empty = "continuation" if context else "context"
        raise InputError(f"a {empty} without tokens cannot be scored")
    if len(continuation) > longest:
        raise InputError(f"a continuation of {len(continuation)} tokens exceeds model.context_length = {longest}")
