"""The sample that a run ends with: a held-out text continued, or a held-out conversation answered."""

import math
from typing import TYPE_CHECKING

from jaxlm.config.experiment import Experiment
from jaxlm.data.dataset import Dataset
from jaxlm.inference.completion import Completer
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Request, Sampling, max_new_tokens
from jaxlm.inference.sampling import NotFinite
from jaxlm.inference.settings import EngineSettings
from jaxlm.models import tree as model_tree
from jaxlm.models.tree import Tree

if TYPE_CHECKING:
    from jax.sharding import Mesh

_PROMPT_ENDS = "[prompt ends]"  # between the prompt and what the model wrote
_SAMPLING = Sampling(temperature=0.8, top_p=0.95)


def sample(experiment: Experiment, dataset: Dataset, parameters: Tree, mesh: "Mesh") -> str:
    """Return a held-out text continued from its beginning, or a held-out conversation with its last answer by the
    model; a mark stands where the prompt ends. A model that has diverged gives a remark in place of a text."""
    model, tokenizer = experiment.model, dataset.tokenizer
    prompt, stop_token_ids = _prompt(dataset, most=math.ceil(model.context_length / 2))
    tokens = min(experiment.records.sample_tokens, max_new_tokens(model, len(prompt)))
    request = Request(
        prompt, tokens, _SAMPLING, stop_token_ids=stop_token_ids or (), is_answer=stop_token_ids is not None
    )
    engine = Engine(
        model,
        model_tree.cast(model_tree.abstract(model)[1], parameters, experiment.execution.dtype),
        mesh,
        EngineSettings(slots=1, context=request.most_tokens),
        valid_token_mask=tokenizer.valid_token_mask(model.vocab_size),
        stop_token_ids=tokenizer.stop_token_ids,
        kernels=experiment.execution.kernels,
    )
    try:
        pieces = Completer(engine, tokenizer)([request], experiment.training.seed)
        continuation = "".join(piece.text or "" for piece in pieces)
    except NotFinite:
        continuation = "[no token can be drawn: the model's logits are not finite]"
    return f"{tokenizer.decode(prompt)}{_PROMPT_ENDS}{continuation}"


def _prompt(dataset: Dataset, most: int) -> tuple[list[int], set[int] | None]:
    """Return a prompt of at most so many tokens, and of a conversation the tokens that end its answers."""
    store = max(dataset.sources.values(), key=lambda source: source.weight).held_out
    document = int(store.lengths.argmax())
    if not store.of_conversations:
        return store.read(document, 0, min(32, most, int(store.lengths[document]))).tolist(), None
    # Of each conversation the tokens before its first answer.
    questions = (int(store.learned(number, 0, int(length)).argmax()) for number, length in enumerate(store.lengths))
    fitting = ((number, tokens) for number, tokens in enumerate(questions) if 0 < tokens <= most)
    document, tokens = next(fitting, (document, most))
    whole = document, 0, int(store.lengths[document])
    last = store.read(*whole)[store.learned(*whole)][-1:].tolist()
    stop_token_ids = {*last} & {*dataset.tokenizer.controls.values()}  # as the template ends an answer
    return store.read(document, 0, tokens).tolist(), stop_token_ids
