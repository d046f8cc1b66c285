"""An adapter that is served beside its base: that of a run with [lora], or of a PEFT directory."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxlm.core import copies
from jaxlm.core.errors import InputError
from jaxlm.core.schema import shown
from jaxlm.data.config import HUGGING_FACE
from jaxlm.families import hub
from jaxlm.families.files import ADAPTER_CONFIG, is_adapter
from jaxlm.runs.adapters import AdaptedWeights, family_of
from jaxlm.runs.folder import Run, nearest_run
from jaxlm.runs.published import PublishedSource
from jaxlm.runs.source import ModelSource, WeightsRequest
from jaxlm.runs.trained import RunChat, RunSource
from jaxlm.training.changes import architecture
from jaxlm.training.paths import small_files

if TYPE_CHECKING:
    from jaxlm.data.chat_template import ChatTemplate
    from jaxlm.families.peft import AdapterBase
    from jaxlm.inference.adapters import NamedAdapter


class ServedAdapter(Protocol):
    """An adapter under a name, and the base that it is served beside."""

    def load(self, request: WeightsRequest, step: int) -> "NamedAdapter":
        """Return its matrices. Raises InputError where it is broken, or adapts another model.

        Args:
          request: that of the base's weights, which says the form that they are served in.
          step: of the base.
        """
        ...

    def chat_template(self) -> "ChatTemplate | None":
        """Return the chat template that it was trained with, where it has one of its own."""
        ...


def adapter_of(name: str, path: Path, base: ModelSource) -> ServedAdapter:
    """Return the adapter at a path. Raises InputError where there is none, or one of another architecture."""
    run = Run(path)
    if run.has_adapters:
        return RunAdapter(name, run, base)
    if hub.is_name(path) or is_adapter(path):
        return PublishedAdapter(name, path, base)
    if not path.exists():
        near = nearest_run(path)
        ask = f"did you mean {near}?" if near else f"give a run with [lora] or a PEFT directory ({ADAPTER_CONFIG})"
        raise InputError(f"adapter {name}: there is no {path}; {ask}")
    raise InputError(
        f"adapter {name}: {path} is no run with adapters ([lora]) and no PEFT directory ({ADAPTER_CONFIG}); a whole "
        "model is used by itself"
    )


class RunAdapter:
    """The adapter of a run with [lora]."""

    def __init__(self, name: str, run: Run, base: ModelSource):
        if changed := architecture(base.experiment(), run.experiment()):
            was = ", ".join(f"{change.key} = {shown(change.now)}" for change in changed[:2])
            raise InputError(f"adapter {name}: {run} adapts another model than {base}, one of {was}")
        self._name, self._run, self._base = name, run, base

    def load(self, request: WeightsRequest, step: int) -> "NamedAdapter":
        """Return its matrices, as `ServedAdapter.load` does."""
        from jaxlm.inference.adapters import NamedAdapter
        from jaxlm.models import tree
        from jaxlm.parallel.partition import on_every_device

        self._check(request, step)
        weights = AdaptedWeights(self._run, self._base.weights)
        _, adapters = weights.adapters(request._replace(checkpoint="newest", average=False))
        leaves = tree.paths(on_every_device(adapters, request.mesh))
        paths, scale = [path.removesuffix("/a") for path in leaves if path.endswith("/a")], weights.lora.scale
        return NamedAdapter(self._name, {path: (leaves[f"{path}/a"], scale * leaves[f"{path}/b"]) for path in paths})

    def _check(self, request: WeightsRequest, step: int) -> None:
        """Raise InputError where the run adapts other weights than are served."""
        run, base, origin = self._run, self._base, self._run.begun_from
        if origin is None:
            raise InputError(f"{run} has adapters, and no {run.paths.origin.name} says of which model; put it back")
        if origin.digest != base.weights.digest(step):
            raise InputError(f"adapter {self._name}: {run} adapts {origin}, whose weights are not those of {base}")
        trained, served = run.experiment().execution.quantization, request.quantized
        if trained != served:
            trained_in, served_in = (form or "their full width" for form in (trained, served))
            request.say(
                f"adapter {self._name} was trained beside matrices in {trained_in}, and is served beside {served_in}"
            )

    def chat_template(self) -> "ChatTemplate | None":
        """Return the chat template of a run that was trained on conversations."""
        if not self._run.experiment().data.of_conversations:
            return None
        chat = RunChat(self._run)
        template = chat.template()
        return template and template.with_kwargs(chat.variables)


class PublishedAdapter:
    """The adapter in a PEFT directory, here or of the Hub."""

    def __init__(self, name: str, path: Path, base: ModelSource):
        from jaxlm.families.peft import PeftAdapter

        copies.pull(path, small_files)
        folder = hub.fetch(path) if hub.is_name(path) else path
        if not is_adapter(folder):
            raise InputError(f"adapter {name}: {path} is no PEFT directory; it has no {ADAPTER_CONFIG}")
        self._name, self._path, self._base = name, path, base
        self._peft = PeftAdapter(folder)

    def load(self, request: WeightsRequest, step: int) -> "NamedAdapter":
        """Return its matrices, as `ServedAdapter.load` does. Models of other paths or names than the adapter's are told
        apart as far as both are here, or both of the Hub."""
        from jaxlm.inference.adapters import NamedAdapter

        self._check(request.say)
        return NamedAdapter(self._name, self._peft.matrices(self._adapted()))

    def _check(self, say: Callable[[str], None]) -> None:
        from jaxlm.families.directory import PublishedModel
        from jaxlm.families.peft import is_hub_name

        base, named = self._base, self._peft.base_name
        if not isinstance(base, PublishedSource):
            return
        other, hub_name = f"adapter {self._name}: {self._path} adapts {named}", base.model.hub_name
        set_it = f"serve that, or set base_model_name_or_path in {self._peft.folder / ADAPTER_CONFIG}"
        if (found := self._peft.base_folder) is not None:
            if found.resolve() != base.model.path.resolve() and PublishedModel(found).digest() != base.model.digest():
                raise InputError(f"{other}, whose weights are not those of {base}; {set_it}")
        elif hub_name is not None and is_hub_name(named):
            if hub_name.removeprefix(HUGGING_FACE).partition("@")[0].lower() != named.lower():
                raise InputError(f"{other}, and not {hub_name}; {set_it}")
        else:
            say(f"{other}; that {base} has the same weights cannot be checked")

    def _adapted(self) -> "AdapterBase":
        from jaxlm.families.peft import AdapterBase

        base = self._base
        if isinstance(base, PublishedSource):
            return AdapterBase.of(base.model)
        assert isinstance(base, RunSource)
        family = family_of(base.run)
        return AdapterBase(str(base), base.experiment().model, family, family.rules)

    def chat_template(self) -> "ChatTemplate | None":
        """Return the chat template beside the adapter."""
        from jaxlm.data.chat_template import FILE, SETTINGS, read

        folder, text = self._peft.folder, self._base.text
        if not (folder / FILE).is_file() or not text.has_tokenizer:
            return None
        settings = folder if (folder / SETTINGS).is_file() else text.tokenizer_file.parent
        return read(folder / FILE, settings, text.load_tokenizer())
