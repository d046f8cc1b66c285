"""The weights of a trained or published model, laid out on devices: its logits, its losses, its templates."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, cast

from jaxlm.core.errors import InputError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxlm.config.experiment import Experiment
    from jaxlm.data.call_shapes import Message
    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.data.tokenizers import Tokenizer
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

# A text or token ids to continue, or the messages of a conversation to answer, each with `role` and `content`.
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"


class RestoredModel:
    """A trained or published model, whose parameters are restored when they are first asked for.

    Attributes:
      experiment: that of its run, with overrides.
      adapters: that are served beside it, by name; set before an engine is made.
      adapter: the name of the one that texts are drawn with; None for the model itself.
    """

    def __init__(
        self,
        source: "ModelSource",
        experiment: "Experiment",
        checkpoint: Literal["newest", "best"],
        average: bool,
        dtype: str | None,
        workload: "Kind",
        say: Callable[[str], None],
        chat_template: str | None = None,
    ):
        self.source, self.experiment = source, experiment
        self._given_template = chat_template
        self.adapters: Mapping[str, ServedAdapter] = {}
        self.adapter: str | None = None
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

        from jaxlm.config import mesh_layout
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
            return mesh_layout.layout_of_any_batch(self.experiment, devices)
        return mesh_layout.layout(self.experiment, devices, "decode")

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer of the run, or None. Raises InputError for one with more tokens than the model."""
        return self.source.text.load_tokenizer() if self.source.text.has_tokenizer else None

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The chat template of what texts are drawn with. Raises InputError where it has none."""
        template = self.chat_template_if_any if self.adapter is None else self.chat_template_of(self.adapter)
        if template is None:
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

    def _check_is_whole(self, what: str) -> None:
        """Raise InputError where texts are drawn with an adapter, which the parameters are without."""
        if self.adapter is not None:
            raise InputError(f"{what} of {self.source} are without adapter {self.adapter}; load the adapter by itself")

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids, those of a conversation up to where the answer begins. Raises InputError for
        text where there is no tokenizer, and for messages where there is no chat template or it refuses them."""
        if is_conversation(prompt):
            ids = self.chat_template.encode(prompt, reply=True)
            self.chat_template.check_shown(prompt, reply=True)
            return ids
        if not isinstance(prompt, str):
            return list(cast("Sequence[int]", prompt))
        return (self.tokenizer or self.source.text.load_tokenizer()).encode_prompt(prompt)

    def logits(self, tokens_BT: Any) -> "jax.Array":
        """Return float32 logits [B, T, V] of the token after each of int32 `tokens_BT`, each row a document. Raises
        InputError where texts are drawn with an adapter."""
        import jax

        self._check_is_whole("logits")

        with jax.set_mesh(self.mesh):
            return self._logits(self.parameters, jax.numpy.asarray(tokens_BT, dtype=jax.numpy.int32))

    def evaluate(
        self, data: str | None = None, display: "Display | None" = None, *, is_chat: bool = False
    ) -> "Evaluation":
        """Return the loss on the held-out text of the run, or on all of the text at `data` (a file, directory or glob).

        With `is_chat` there are conversations at `data`, as in `data.chat`, and the loss is that on their answers.
        Raises InputError where the text cannot be read, or is not what the run was trained with, and where texts are
        drawn with an adapter.
        """
        import jax

        from jaxlm.costs.layer_loops import experiment_on
        from jaxlm.runs.source import text_rows
        from jaxlm.training.display import Display
        from jaxlm.training.evaluation import evaluate_sources
        from jaxlm.training.step import TrainStep

        self._check_is_whole("losses")
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

    def _hand_over(self) -> "tuple[int, Tree]":
        """Return the step and its parameters, which are restored anew where they are asked for again."""
        self._step, parameters = self._restored
        del self._restored
        return self._step, parameters

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


def is_conversation(prompt: Prompt) -> "TypeGuard[Sequence[Message]]":
    """Return whether a prompt is the messages of a conversation."""
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)
