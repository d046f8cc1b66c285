"""A trained or published model in use: its texts, and the engine that draws them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from jaxlm.api.restored import Prompt, RestoredModel, is_conversation
from jaxlm.core.errors import InputError, refuse_single

if TYPE_CHECKING:
    from jaxlm.config.experiment import Experiment
    from jaxlm.costs.workload import Workload
    from jaxlm.inference.completion import Completion, TextChunk
    from jaxlm.inference.draft_model import DraftModel
    from jaxlm.inference.engine import Engine
    from jaxlm.inference.grammar import Grammar, Grammars
    from jaxlm.inference.requests import Named, Request, Sampling
    from jaxlm.inference.settings import EngineSettings
    from jaxlm.parallel.rules import Kind
    from jaxlm.runs.source import ModelSource

MAX_TOKENS = 100  # that are drawn where nobody says how many
MAX_ANSWER_TOKENS = 1024  # of an answer

# Fields of Sampling that generation_config.json may have, with what transformers writes where one changes nothing.
_PUBLISHED: dict[str, float | None] = {
    **{"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": None, "frequency_penalty": None},
}


class LoadedModel(RestoredModel):
    """A trained or published model with an engine: `load` makes one.

    Attributes:
      settings: of the engine that `engine` makes.
    """

    def __init__(
        self,
        source: "ModelSource",
        experiment: "Experiment",
        checkpoint: Literal["newest", "best"],
        average: bool,
        dtype: str | None,
        workload: "Kind",
        engine: "EngineSettings | None",
        say: Callable[[str], None],
        chat_template: str | None = None,
    ):
        super().__init__(source, experiment, checkpoint, average, dtype, workload, say, chat_template)
        self.settings = engine or experiment.inference.settings()
        self._engine: Engine | None = None
        self._longest = experiment.model.context_length  # that its draft model has too

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | None = None,
        *,
        num_samples: int = 1,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
    ) -> "list[Completion]":
        """Continue prompts, each up to the separator of documents, and answer conversations: `num_samples`
        continuations of the first prompt, then of the next. They are drawn together, and each is as if it were alone.

        Args:
          prompts: texts, lists of token ids, or conversations: lists of messages such as {"role": "user",
            "content": "Hello"}, which the model's chat template shows.
          max_tokens: the most tokens to draw for each; by default `MAX_TOKENS`, of answers `MAX_ANSWER_TOKENS`, or what
            the context leaves.
          num_samples: continuations of each prompt.
          temperature: 0 takes the likeliest token. By default it, `top_k` and `top_p` are those of
            generation_config.json of published weights, or 1 and every token.
          top_k: draws among the k likeliest.
          top_p: draws among the fewest that hold this much of the probability.
          stop: strings that end a text before them; the name of a control token ends it where the model writes the
            token, which is no part of the text.
          seed: another seed draws other text. A continuation has random numbers of the seed, its prompt's place and its
            own among the samples, so that it does not depend on the others.
          json_schema: each text is a value of this JSON schema; an answer is one behind what the model thinks.
          regex: each text is one that this regular expression matches whole.

        Raises InputError for values that mean nothing, prompts without tokens, more tokens than the context holds, stop
        strings or a form of texts without a tokenizer, or logits that are not finite.
        """
        from jaxlm.inference.completion import completions

        drawn = self.stream(
            prompts, max_tokens, num_samples=num_samples, temperature=temperature, top_k=top_k, top_p=top_p,
            stop=stop, seed=seed, json_schema=json_schema, regex=regex,
        )  # fmt: skip
        return completions(drawn, len(prompts) * num_samples)

    def stream(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | None = None,
        *,
        num_samples: int = 1,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
    ) -> "Iterator[TextChunk]":
        """Return the pieces of what `generate` gives, as they are drawn. Raises InputError as it does, at once but for
        logits that are not finite."""
        from jaxlm.inference.requests import Sampling, check_seed

        check_seed(seed)
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        chosen = {name: value for name, value in options.items() if value is not None}
        Sampling(**chosen).check()
        sampling, grammar = self.sampling(**chosen), _grammar(json_schema, regex)
        return self.complete(self.requests(prompts, max_tokens, num_samples, sampling, stop, grammar), seed)

    def requests(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | None,
        num_samples: int,
        sampling: "Sampling",
        stop: Sequence[str],
        grammar: "Grammar | None" = None,
        named: "Named" = "{} =".format,
    ) -> "list[Request]":
        """Return what `generate` asks for, for `complete`. Raises InputError as `jaxlm.inference.requests.sampled`.

        Args:
          grammar: of continuations, and of answers behind what is thought.
        """
        from jaxlm.inference.requests import fitting_tokens, sampled
        from jaxlm.inference.stop_strings import stops_that_are_tokens

        if isinstance(prompts, str | Mapping) or any(isinstance(each, Integral | Mapping) for each in prompts[:1]):
            raise InputError("prompts is a single prompt, and has to be a list of prompts: [prompt]")
        refuse_single("stop", stop)
        encoded, limits = [self.encode(prompt) for prompt in prompts], [max_tokens or 0] * len(prompts)
        chats = [is_conversation(prompt) for prompt in prompts]
        if max_tokens is None:
            limits = [
                fitting_tokens(self.config, len(ids), MAX_ANSWER_TOKENS if chat else MAX_TOKENS)
                for ids, chat in zip(encoded, chats, strict=True)
            ]
        requests = sampled(self.config, encoded, limits, num_samples, sampling, stop, named)
        if grammar is not None:
            self.check_grammar(grammar)
        stops = stops_that_are_tokens(stop, self.tokenizer.controls) if self.tokenizer else frozenset()
        grammars = self._grammars_of_answers(grammar, encoded) if grammar and any(chats) else [None] * len(prompts)
        return [
            request._replace(
                stop_token_ids=stops | self.chat_template.stop_token_ids,
                is_answer=True,
                adapter=self.adapter,
                grammar=grammars[row // num_samples],
            )
            if chats[row // num_samples]
            else request._replace(stop_token_ids=stops, grammar=grammar, adapter=self.adapter)
            for row, request in enumerate(requests)
        ]

    def check_grammar(self, grammar: "Grammar") -> None:
        """Raise InputError for a grammar of texts that cannot be used, without the parameters."""
        if self._grammars is None:
            raise InputError(f"{self.source} has no tokenizer, and a grammar is of texts; leave it out")
        self._grammars.compile(grammar)

    @cached_property
    def _grammars(self) -> "Grammars | None":
        """The compiler of grammars for the model's tokens; None without a tokenizer."""
        from jaxlm.inference.grammar import Grammars

        return self.tokenizer and Grammars(self.tokenizer, self.config.vocab_size)

    def _grammars_of_answers(self, grammar: "Grammar", prompts: Sequence[Sequence[int]]) -> "list[Grammar]":
        """Return the grammars of answers to prompts, as a server has them."""
        from jaxlm.server.answers.answer_formats import form_of, grammar_of_answer

        template = self.chat_template
        form = form_of(template)
        return [grammar_of_answer(form, grammar, template.tokenizer, prompt) for prompt in prompts]

    def sampling(self, **chosen: Any) -> "Sampling":
        """Return the sampling of the chosen fields of `Sampling`; the others are those of generation_config.json of
        published weights. Raises InputError for values there that mean nothing."""
        from jaxlm.inference.requests import Sampling

        published = self.source.chat.generation
        values = {
            name: published[name]
            for name, off in _PUBLISHED.items()
            if published.get("do_sample") and published.get(name, off) not in (None, off)
        }
        if taken := [f"{name} = {value}" for name, value in values.items() if name not in chosen]:
            self._say(f"{', '.join(taken)} of generation_config.json")
        return Sampling(**{**values, **chosen}).check("generation_config.json: {} =".format)

    def complete(self, requests: "Sequence[Request]", seed: int = 0) -> "Iterator[TextChunk]":
        """Return the pieces of the continuations of requests, as they are drawn. Raises InputError as `generate`."""
        from jaxlm.inference.completion import Completer

        if self.tokenizer is None and any(request.stop for request in requests):
            raise InputError("the run has no tokenizer, so that there is no text to find a stop string in")
        longest = max((request.most_tokens for request in requests), default=1)
        return Completer(self.engine(longest), self.tokenizer)(requests, seed)

    def engine(self, tokens: int = 1) -> "Engine":
        """Return the engine of the model, for sequences of so many tokens at least. It is made when it is first asked
        for, and again for longer sequences than its cache holds, unless `settings` give it a context or a memory.

        Raises InputError for a model that the engine cannot serve, or where memory does not hold its cache.
        """
        if self._engine is None:
            self._engine = self._new_engine(self.settings)
        may_grow = self.settings.context is None and self.settings.cache_bytes is None
        if may_grow and self._engine.longest < min(tokens, self.config.context_length):
            self._engine = None  # its memory is free before another takes some
            context = min(1 << (tokens - 1).bit_length(), self._longest)
            self._engine = self._new_engine(replace(self.settings, context=context))
        return self._engine

    def set_engine(self, settings: "EngineSettings") -> None:
        """Have `engine` make one of other settings."""
        self.settings, self._engine = settings, None

    def decode_work(self, sequence: int, batch: int | None = None) -> "Workload":
        """Return the decoding step of the engine for costs, of `batch` sequences (one on each shard of a batch) that
        hold so many tokens, without drafts."""
        from jaxlm.costs.workload import Workload
        from jaxlm.parallel.layout import Layout

        work = Workload.of(self.experiment, Layout(**self.mesh.shape), "decode")
        work = work.with_execution(dtype=str(self.engine().runner.programs.dtype))
        plain = replace(work, drafts=0, acceptance=0.0, draft_model=None)
        return replace(plain, batch=batch or work.batch_shards, sequence=sequence)

    def drafting_work(self, sequence: int, batch: int) -> "Workload":
        """Return the step of `decode_work` with the model that draws its drafts, where there is one."""
        from jaxlm.costs.draft_models import planned_draft_model

        work, speculation = self.decode_work(sequence, batch), self.settings.speculation
        if speculation is None or self.settings.looks_up:
            return work
        return replace(work, drafts=speculation.drafts, draft_model=planned_draft_model(speculation.source))

    def _new_engine(self, settings: "EngineSettings") -> "Engine":
        from jaxlm.inference.engine import Engine
        from jaxlm.parallel.rules import ENGINE

        draft = self._draft_model(settings)  # before the weights: what it refuses is said sooner
        step, parameters = self._hand_over()  # the engine keeps weights in a form of its own: two are too many
        request = self._request("float32", ENGINE)
        adapters = [adapter.load(request, step) for adapter in self.adapters.values()]
        return Engine(
            self.config,
            parameters,
            self.mesh,
            settings,
            valid_token_mask=self.tokenizer and self.tokenizer.valid_token_mask(self.config.vocab_size),
            stop_token_ids=(self.tokenizer or self.source.text).stop_token_ids,
            grammars=self._grammars,
            kernels=self.experiment.execution.kernels,
            draft=draft,
            quantized=self.quantization,
            adapters=adapters,
        )

    def _draft_model(self, settings: "EngineSettings") -> "DraftModel | None":
        """Return the model that draws drafts, on the mesh of this one and in its dtype; None where drafts are looked up
        or there are none. Raises InputError for a model of other tokens."""
        if settings.speculation is None or settings.looks_up:
            return None
        from jaxlm import api
        from jaxlm.inference.draft_model import DraftModel
        from jaxlm.inference.settings import LOOK_UP

        source, drafts = settings.speculation
        try:
            draft = api.load(source, dtype=self.dtype, say=self._say)
        except InputError as error:
            raise InputError(
                f"inference.speculate = {source}:{drafts}: {error}; {LOOK_UP}:{drafts} looks drafts up in the text"
            ) from None
        draft.mesh = self.mesh
        own, its = self.tokenizer, draft.tokenizer
        if own and its:
            is_same = own.has_tokens_of(its)
        else:
            is_same = own is its and self.config.vocab_size == draft.config.vocab_size
        if not is_same:
            raise InputError(
                f"{draft.source} has other tokens than {self.source}, and its drafts would be none of them"
            )
        self._longest = min(self._longest, draft.config.context_length)
        return DraftModel(draft.config, draft.parameters, draft.quantization)


def _grammar(json_schema: Mapping[str, Any] | str | None, regex: str | None) -> "Grammar | None":
    """Return the grammar of texts, if one is given. Raises InputError for two, and for a schema that is no JSON."""
    from jaxlm.inference.grammar import Grammar

    if json_schema is not None and regex is not None:
        raise InputError("json_schema and regex are both forms of the text; give one")
    if json_schema is None:
        return None if regex is None else Grammar("regex", regex)
    try:
        return Grammar("json_schema", json_schema if isinstance(json_schema, str) else json.dumps(json_schema))
    except TypeError as error:
        raise InputError(f"json_schema is no JSON: {error}") from None
