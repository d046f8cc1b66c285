"""Log-probabilities of the tokens of prompts, as `prompt_logprobs` asks for them."""

from collections.abc import Sequence

from typing_extensions import TypedDict

from jaxlm.inference.generation import Token
from jaxlm.inference.runner import Scores
from jaxlm.inference.sampling import NO_TOKEN
from jaxlm.server.served import ServedModel


class PromptToken(TypedDict):
    """A token in a place of a prompt: its log-probability there, its rank among all tokens, 1 for the likeliest, and
    its text."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of a prompt that token and the likeliest ones in its place, by their ids; the first has none.
PromptLogprobs = list[dict[str, PromptToken] | None]


class PromptScores:
    """The log-probabilities of a prompt's tokens, which come in chunks."""

    def __init__(self, prompt: Sequence[int]):
        self._prompt, self._chunks = prompt, []

    def add(self, scores: Scores) -> None:
        """Take a chunk."""
        self._chunks.append(scores)

    def tokens(self, likeliest: int) -> list[Token]:
        """Return each token after the first with its log-probability, and those of so many likeliest ones."""
        tokens: list[Token] = [Token(id) for id in self._prompt[1:]]
        for chunk in self._chunks:
            ranks = [None] * len(chunk.logprob) if chunk.rank is None else chunk.rank.tolist()
            rows = zip(chunk.logprob.tolist(), ranks, chunk.top, chunk.top_logprob, strict=True)
            for at, (logprob, rank, top, top_logprob) in enumerate(rows, chunk.first):
                pairs = zip(top[:likeliest].tolist(), top_logprob[:likeliest].tolist(), strict=True)
                best = tuple((id, ln_p) for id, ln_p in pairs if id != NO_TOKEN)
                tokens[at] = Token(self._prompt[at + 1], logprob, best, rank)
        return tokens


def prompt_logprobs(served: ServedModel, tokens: Sequence[Token], likeliest: int) -> PromptLogprobs:
    """Return the tokens of a prompt after the first, with their ranks, as an answer shows them beside so many likeliest
    ones."""

    def shown(id: int, logprob: float, rank: int) -> PromptToken:
        text = served.token_bytes(id).decode(errors="replace")
        return {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": text}

    def place(token: Token) -> dict[str, PromptToken]:
        assert token.logprob is not None and token.rank is not None, "the scores came, with ranks"
        own = {str(token.id): shown(token.id, token.logprob, token.rank)}
        best = enumerate(token.top[:likeliest], 1)
        return own | {str(id): shown(id, logprob, rank) for rank, (id, logprob) in best}

    return [None, *map(place, tokens)]


_LEAST = -9999.0  # in place of -inf, which JSON has not
