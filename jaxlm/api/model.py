"""A trained or published model in use: its parameters, logits and texts, and its engine."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, cast

from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxlm.config import Experiment
    from jaxlm.costs.workload import Workload
    from jaxlm.data.call_shapes import Message
    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.data.tokenizers import Tokenizer
    from jaxlm.inference.completion import Completion, TextChunk
    from jaxlm.inference.draft_model import DraftModel
    from jaxlm.inference.engine import Engine
    from jaxlm.inference.grammar import Grammar, Grammars
    from jaxlm.inference.requests import Named, Request, Sampling
    from jaxlm.inference.settings import EngineSettings
    from jaxlm.models.config import ModelConfig
    from jaxlm.models.execution_config import Dtype
    from jaxlm.models.quantize_config import Quantization
    from jaxlm.models.tree import Tree
    from jaxlm.parallel.layout import Layout
    from jaxlm.parallel.rules import Kind, Rules
    from jaxlm.runs.served_adapter import ServedAdapter
    from jaxlm.runs.source import ModelSource, WeightsRequest
    from jaxlm.training.display import Display
    from jaxlm.training.evaluation import Evaluation

MAX_TOKENS = 100  # that are drawn where nobody says how many
MAX_ANSWER_TOKENS = 1024  # of an answer

# A text or token ids to continue, or the messages of a conversation to answer, each with `role` and `content`.
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"

# Fields of Sampling that generation_config.json may have, with what transformers writes where one changes nothing.
_PUBLISHED: dict[str, float | None] = {
    **{"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": None, "frequency_penalty": None},
}


class LoadedModel:
    """A trained or published model: `load` makes one.

    Attributes:
      experiment: that of its run, with overrides.
      settings: of the engine that `engine` makes.
      adapters: that it serves requests of, by name; set before the engine is made.
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
        self.source, self.experiment = source, experiment
        self._given_template = chat_template
        self.adapters: Mapping[str, ServedAdapter] = {}
        self.settings = engine or experiment.inference.settings()
        self._engine: Engine | None = None
        self._longest = experiment.model.context_length  # that its draft model has too
        self._step: int | None = None
        self._checkpoint, self._average, self._dtype = checkpoint, average, dtype
        self._workload: Kind = workload
        self._say = say

    @property
    def config(self) -> "ModelConfig":
        """The architecture."""
        return self.experiment.model

    @cached_property
    def dtype(self) -> "Dtype":
        """The dtype to compute in, as `load` chooses it."""
        from jaxlm.inference import dtype_choice

        if self._dtype in ("float32", "bfloat16"):
            return cast("Dtype", self._dtype)
        if self._dtype == "auto":
            dtype, why = dtype_choice.fastest()
        elif (stored := self.source.weights.published_dtype) is None:
            return self.experiment.execution.dtype
        else:
            dtype, why = dtype_choice.of_published(stored)
        self._say(f"computing in {dtype}, {why}")
        return dtype

    @property
    def quantization(self) -> "Quantization | None":
        """The form of the matrices of layers; None where they are in `dtype`."""
        return self.experiment.execution.quantization

    @property
    def parameters(self) -> "Tree":
        """The parameters, laid out on `mesh`. Raises InputError where there is no whole checkpoint."""
        return self._restored[1]

    @property
    def step(self) -> int:
        """The step that the parameters are of."""
        return self._restored[0] if self._step is None else self._step

    @cached_property
    def mesh(self) -> "Mesh":
        """The mesh on this machine's devices. Raises InputError where the experiment's does not divide them."""
        from jaxlm.parallel.devices import mesh_here

        return mesh_here(self.experiment.mesh.least().size, self._layout)

    def _layout(self, devices: int) -> "Layout":
        import jax

        from jaxlm import config
        from jaxlm.costs.hardware.target import of_devices
        from jaxlm.costs.placement import layout_on

        device = jax.devices()[0]
        if self._workload == "decode":
            try:
                return layout_on(self.experiment, of_devices(device.device_kind, device.platform, devices), "decode")
            except InputError:  # a chip that the catalog does not know
                pass
        # Nothing is trained: any number of sequences will do.
        if self._workload == "train":  # its evaluation
            return config.layout_of_any_batch(self.experiment, devices)
        return config.layout(self.experiment, devices, "decode")

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer of the run, or None. Raises InputError for one with more tokens than the model."""
        return self.source.text.load_tokenizer() if self.source.text.has_tokenizer else None

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The chat template. Raises InputError for a model without one."""
        if (template := self.chat_template_if_any) is None:
            from jaxlm.data.named_templates import NAMES

            raise InputError(
                f"{self.source} has no chat template (chat_template.jinja, or one in tokenizer_config.json); give the "
                f"one that it was trained with by --chat-template, a file or {', '.join(NAMES)}, or leave out --chat"
            )
        return template

    @property
    def chat_template_if_any(self) -> "ChatTemplate | None":
        """The chat template, the given one before the model's own; None without one."""
        if self._given_template is not None:
            return self.source.chat.template(self._given_template)
        template = self.source.chat.template()
        return template and template.with_kwargs(self.source.chat.variables)

    def chat_template_of(self, adapter: str) -> "ChatTemplate | None":
        """Return the chat template of an adapter by name: a given one, its own, or the model's; None without one."""
        own = None if self._given_template is not None else self.adapters[adapter].chat_template()
        return own or self.chat_template_if_any

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids, those of a conversation up to where the answer begins. Raises InputError for
        text where there is no tokenizer, and for messages where there is no chat template or it refuses them."""
        if _is_conversation(prompt):
            ids = self.chat_template.encode(prompt, reply=True)
            self.chat_template.check_shown(prompt, reply=True)
            return ids
        if not isinstance(prompt, str):
            return list(cast("Sequence[int]", prompt))
        return (self.tokenizer or self.source.text.load_tokenizer()).encode_prompt(prompt)

    def logits(self, tokens_BT: Any) -> "jax.Array":
        """Return float32 logits [B, T, V] of the token after each of int32 `tokens_BT`, each row a document."""
        import jax

        with jax.set_mesh(self.mesh):
            return self._logits(self.parameters, jax.numpy.asarray(tokens_BT, dtype=jax.numpy.int32))

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

        encoded, limits = [self.encode(prompt) for prompt in prompts], [max_tokens or 0] * len(prompts)
        chats = [_is_conversation(prompt) for prompt in prompts]
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
                grammar=grammars[row // num_samples],
            )
            if chats[row // num_samples]
            else request._replace(stop_token_ids=stops, grammar=grammar)
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
        self._step, parameters = self._restored
        del self._restored  # the engine keeps weights in a form of its own, and two are too many
        request = self._request("float32", ENGINE)
        adapters = [adapter.load(request, self._step) for adapter in self.adapters.values()]
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

    def evaluate(
        self, data: str | None = None, display: "Display | None" = None, *, is_chat: bool = False
    ) -> "Evaluation":
        """Return the loss on the held-out text of the run, or on all of the text at `data` (a file, directory or glob).

        With `is_chat` there are conversations at `data`, as in `data.chat`, and the loss is that on their answers.
        Raises InputError where the text cannot be read, or is not what the run was trained with.
        """
        import jax

        from jaxlm.costs.layer_loops import experiment_on
        from jaxlm.runs.source import text_rows
        from jaxlm.training.display import Display
        from jaxlm.training.evaluation import evaluate_sources
        from jaxlm.training.step import TrainStep

        experiment, training = self.experiment, self.experiment.training
        if is_chat and data is None:
            raise InputError("is_chat is of other text; give data, the path of conversations")
        template = self.chat_template if is_chat else None
        if data is not None:
            self.source.text.load_tokenizer()  # refused before anything is restored
        else:
            self.source.text.check_held_out(experiment)
        parameters = self.parameters
        # The options are of the programs of training, perhaps on chips that take others.
        here = {"dtype": self.dtype, "compiler_options": {}}
        execution = experiment_on(experiment, self.mesh).execution.model_copy(update=here)
        steps = TrainStep(self.config, execution, training, experiment.optimizer).jitted(self.mesh)
        with display or Display() as shown:
            if data is None:
                text = self.source.text.held_out(experiment, shown)
            else:
                text = text_rows(experiment, data, self.source.text.load_tokenizer(), template, shown)
        with jax.set_mesh(self.mesh):
            measured = evaluate_sources(steps.evaluate, parameters, text, training.batch, self.mesh)
        assert measured is not None  # nothing stops it
        return measured

    @cached_property
    def _restored(self) -> "tuple[int, Tree]":
        """The step and its parameters, rounded on their way: they never lie on the devices in float32 too."""
        from jaxlm.parallel.rules import FORWARD, RULES

        if self._dtype == "stored":
            dtype = None
        else:
            dtype = "float32" if self._workload == "train" else self.dtype
        rules = FORWARD if self._workload == "prefill" else RULES[self._workload]
        return self.source.weights.restore(self._request(dtype, rules))

    def _request(self, dtype: str | None, rules: "Rules") -> "WeightsRequest":
        """Return the request for the weights in a dtype, as these rules shard them."""
        from jaxlm.runs.source import WeightsRequest

        asked = self._checkpoint, self._average, self._say, self.quantization
        return WeightsRequest(self.config, self.mesh, rules, dtype, *asked)

    @cached_property
    def _logits(self) -> "Callable[[Tree, jax.Array], jax.Array]":
        import jax
        from flax import nnx

        from jaxlm.models.kernels import using_kernels
        from jaxlm.models.positions import packed_causal_mask
        from jaxlm.models.tree import abstract
        from jaxlm.parallel.partition import using_rules
        from jaxlm.parallel.rules import FORWARD

        graph, _ = abstract(self.config, quantized=self.quantization)

        @jax.jit
        @using_rules(FORWARD)
        @using_kernels(self.experiment.execution.kernels)
        def logits(parameters: "Tree", tokens_BT: jax.Array) -> jax.Array:
            module = nnx.merge(graph, parameters)
            positions_BT = jax.numpy.broadcast_to(jax.numpy.arange(tokens_BT.shape[1]), tokens_BT.shape)
            hidden_BTD, _, _ = module.hidden(tokens_BT, positions_BT, packed_causal_mask(positions_BT))
            return module.logits(hidden_BTD)

        return logits


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


def _is_conversation(prompt: Prompt) -> "TypeGuard[Sequence[Message]]":
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)
