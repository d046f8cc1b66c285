"""An adapter of a model to EleutherAI's lm-evaluation-harness. Needs the extra `lm-eval`."""

from collections import Counter, defaultdict
from typing import Any

from jax.sharding import Mesh
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from pydantic import TypeAdapter, ValidationError
from tqdm import tqdm

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.detokenizer import Detokenizer
from jaxlm.inference.generate import before_stop, generate
from jaxlm.inference.requests import Sampling, max_prompt_tokens
from jaxlm.inference.scoring import Scorer, padded_length
from jaxlm.models.config import Kernels, ModelConfig
from jaxlm.models.tree import Tree

_SECTION = "generation_kwargs"
_TYPES = {
    **dict.fromkeys(("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"), int),
    **{"do_sample": bool, "temperature": float, "top_k": int, "top_p": float, "until": str | list[str]},
}
# Values by which tasks switch an option off.
_OFF = {
    **{"top_k": (0, -1), "min_p": (0,), "typical_p": (1,), "num_beams": (1,)},
    **{"repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,)},
}
_MAX_TOKENS = 256  # the harness's default, used unless the task gives a number or the context is too short


class HarnessModel(TemplateLM):
    """The three request types of `lm_eval`, answered for parameters on a mesh, `batch` requests at a time.

    As in training, a text begins after the tokenizer's separator. A request that is too long for the context loses its
    beginning, as everywhere in the harness; `truncated` counts these requests by task. Parameters are in the dtype to
    compute in.
    """

    def __init__(
        self,
        model: ModelConfig,
        parameters: Tree,
        tokenizer: Tokenizer,
        batch: int,
        mesh: Mesh,
        kernels: Kernels = "auto",
    ):
        super().__init__()
        self._model, self._parameters, self._mesh = model, parameters, mesh
        self._tokens, self._batch, self._kernels = tokenizer, batch, kernels
        self.truncated: Counter[str] = Counter()
        self._asked: list[Instance] = []
        self._score = Scorer(model, parameters, batch, mesh, tokenizer.vocab_size, kernels)

    @property
    def eot_token_id(self) -> int:
        """The separator of documents. Raises InputError if the tokenizer has none."""
        if self._tokens.separator is None:
            raise InputError("the run's tokenizer has no separator, so that nothing stands before a text's first token")
        return self._tokens.separator

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text from its beginning, or of a continuation (`add_special_tokens` is False)."""
        return self._tokens.encode(string) if add_special_tokens is False else self._tokens.encode_prompt(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (ln p(continuation | context), whether greedy decoding gives it) for each request."""
        self._asked = requests
        return super().loglikelihood(requests, disable_tqdm=True)  # tokenizing is quick; scoring shows a bar

    def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        scores = self._scores(pairs)
        self.truncated.update(one.task_name for one, score in zip(self._asked, scores, strict=True) if score.truncated)
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return ln p of whole texts, each token after the context that the windows of the harness give it."""
        pairs, sizes = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self._model.context_length, context_len=1)
            before = len(pairs)
            pairs += map(make_disjoint_window, windows)
            sizes.append(len(pairs) - before)
        scores = iter(self._scores(pairs))
        return [sum(next(scores).logprob for _ in range(size)) for size in sizes]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to a separator, a stop string or the maximum of tokens.

        What is drawn at random depends on a request's place among the others, and not on batches.

        Raises InputError for generation options that jaxlm does not have.
        """
        alike = defaultdict(list)  # the requests of one batch end alike
        for index, request in enumerate(requests):
            context, given = request.args
            sampling, max_tokens, stops = generation_options(given, self._model.context_length)
            prompt = self.tok_encode(context)
            self.truncated[request.task_name] += len(prompt) > max_prompt_tokens(self._model, max_tokens)
            alike[max_tokens, stops].append((prompt, sampling, index))
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generating", disable=None) as bar:
            for (max_tokens, stops), asked in alike.items():
                asked.sort(key=lambda request: -len(request[0]))
                for first in range(0, len(asked), self._batch):
                    together = asked[first : first + self._batch]
                    drawn = self._continue(together, max_tokens, stops)
                    for (_, _, index), text in zip(together, drawn, strict=True):
                        texts[index] = text
                    bar.update(len(together))
        return texts

    def _continue(self, asked: list, max_tokens: int, stops: tuple) -> list[str]:
        longest = max_prompt_tokens(self._model, max_tokens)
        prompts = [prompt[-longest:] for prompt, _, _ in asked]
        pad_to = padded_length(max(map(len, prompts)), longest)
        filled = [*asked, *[asked[-1]] * (self._batch - len(asked))]  # always the same program
        rows, sampling, streams = zip(*((p[-longest:], how, index) for p, how, index in filled), strict=True)
        following = [Detokenizer(self._tokens, prompt) for prompt in prompts]
        texts, going = [""] * len(prompts), set(range(len(prompts)))

        def write(row: int, piece: str) -> None:
            whole = texts[row] + piece
            texts[row] = before_stop(whole, stops, known=len(texts[row]))
            if texts[row] != whole:
                going.remove(row)

        for tokens in generate(
            self._model, self._parameters, rows, max_tokens, self._mesh, sampling=sampling, streams=streams,
            vocab_size=self._tokens.vocab_size, pad_to=pad_to, kernels=self._kernels,
        ):  # fmt: skip
            for row in tuple(going):
                if tokens[row] == self._tokens.separator:
                    write(row, following[row].rest())
                    going.discard(row)
                else:
                    write(row, following[row].add(int(tokens[row])))
            if not going:
                break
        for row in tuple(going):
            write(row, following[row].rest())
        return texts

    def _scores(self, pairs: list) -> list:
        scores = [None] * len(pairs)
        with tqdm(total=len(pairs), desc="scoring", disable=None) as bar:
            for index, score in self._score(pairs):
                scores[index] = score
                bar.update()
        return scores


def generation_options(given: dict, context: int) -> tuple[Sampling, int, tuple[str, ...]]:
    """Return the sampling, the maximum of tokens and the stop strings of a task's `generation_kwargs`.

    Raises InputError for options that jaxlm does not have, unless they are switched off.
    """
    given = {key: _read(key, value) for key, value in given.items() if value is not None}
    options = normalize_gen_kwargs(given, min(_MAX_TOKENS, context // 2))
    options = {key: value for key, value in options.items() if value not in _OFF.get(key, ())}
    greedy = not options.pop("do_sample")
    drawn = Sampling(*(options.pop(name, default) for name, default in Sampling()._asdict().items()))
    max_tokens, stops = options.pop("max_gen_toks"), tuple(options.pop("until"))
    if options:
        raise InputError(f"{_SECTION}: {', '.join(options)} is nothing that jaxlm can generate with")
    if not 0 < max_tokens <= context:
        raise InputError(f"{_SECTION}.max_gen_toks = {max_tokens} must be 1 to model.context_length = {context}")
    return Sampling(temperature=0.0) if greedy else drawn.check((_SECTION + ".{} =").format), max_tokens, stops


def _read(key: str, value: Any) -> Any:
    """Return a value in the type of its key. Raises InputError if it has another type."""
    try:
        return TypeAdapter(_TYPES.get(key, Any)).validate_python(value)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise InputError(f"{_SECTION}.{key} = {value!r}: {why[0].lower()}{why[1:]}") from None
