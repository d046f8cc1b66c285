"""A run with adapters as a source of weights: those of its base, with its adapters added."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlm import config
from jaxlm.core.errors import InputError
from jaxlm.core.files import unwritable
from jaxlm.data.config import HUGGING_FACE
from jaxlm.families.files import ADAPTER_CONFIG, CONFIG, is_published, read_json, text_of
from jaxlm.models.config import ModelConfig
from jaxlm.run import Run
from jaxlm.source import ModelSource
from jaxlm.training.origin import Origin

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxlm.models.lora_config import LoraConfig
    from jaxlm.models.tree import Tree
    from jaxlm.parallel.rules import Rules


class LoraRun(Run):
    """The folder of a run with adapters, and the model that they adapt."""

    def __init__(self, directory: Path, base: ModelSource):
        super().__init__(directory)
        self.base = base

    @property
    def lora(self) -> "LoraConfig":
        """Its section [lora]."""
        lora = self.experiment().lora
        assert lora is not None
        return lora

    def checked_origin(self) -> Origin:
        """Return what the run remembers of its base. Raises InputError where the weights there are others."""
        origin = self.begun_from
        assert origin is not None
        origin.check(self, self.base)
        return origin

    def adapters(
        self,
        model: ModelConfig,
        mesh: "Mesh",
        rules: "Rules",
        checkpoint: str | int,
        average: bool,
        say: Callable[[str], None],
    ) -> "tuple[int, Tree]":
        """Return a step and its adapters alone, float32. Raises InputError as `restore` does."""
        from jaxlm.models import tree as model_tree

        adapters, _ = model_tree.trained(model_tree.abstract(model, self.lora)[1])
        return self.restored(adapters, mesh, rules, "float32", checkpoint, average, say)

    def restore(
        self,
        model: ModelConfig,
        mesh: "Mesh",
        rules: "Rules",
        dtype: "jax.typing.DTypeLike | None",
        *,
        checkpoint: str | int = "newest",
        average: bool = False,
        say: Callable[[str], None] = print,
    ) -> "tuple[int, Tree]":
        """Return a step and the sums of the base's matrices and its adapters, as `Run.restore` does. Raises InputError
        also where the base has changed."""
        from jaxlm.models import tree as model_tree

        step, adapters = self.adapters(model, mesh, rules, checkpoint, average, say)
        begun = self.checked_origin().step
        _, parameters = self.base.restore(
            model, mesh, rules, dtype, checkpoint="newest" if begun is None else begun, say=say
        )
        parameters = model_tree.under_adapters(parameters, model_tree.targets(model, self.lora))
        return step, model_tree.merged(model, self.lora, model_tree.joined(parameters, adapters), mesh, rules)

    def weights_digest(self, step: int | None = None) -> str:
        """Return a digest of a step of the adapters and of what they adapt."""
        return f"{super().weights_digest(step)}+{self.base.weights_digest(self.checked_origin().step)}"

    def export(self, out: Path, checkpoint: str, average: bool, say: Callable[[str], None]) -> tuple[str, int]:
        """Write the adapters as a PEFT directory, and return the family and their numbers.

        Raises InputError for a model of no family, for a folder that is there, and as `restore` does.
        """
        from jaxlm.families import family, peft, settings
        from jaxlm.parallel.devices import mesh_here
        from jaxlm.parallel.rules import DECODE

        if out.exists() or unwritable(out):
            raise InputError(f"{out} is there, or cannot be made; give another folder")
        experiment, carried, origin = self.experiment(), self.paths.huggingface / CONFIG, self.checked_origin()
        if carried.is_file():
            found = family.named(text_of(read_json(carried)).get("model_type"), str(carried))
        else:
            found = settings.family_of(experiment.model)
        name = origin.source.removeprefix(HUGGING_FACE).partition("@")[0] if origin.revision else origin.source
        if not origin.revision and not is_published(Path(name)):
            say(f"{name} is no Hugging Face directory, as PEFT needs one: export it, and put that in {ADAPTER_CONFIG}")
        mesh = mesh_here(1, lambda devices: config.layout(experiment, devices, "decode"))
        _, adapters = self.adapters(experiment.model, mesh, DECODE, checkpoint, average, say)
        named = {"base_model_name_or_path": name} | ({"revision": origin.revision} if origin.revision else {})
        return found.name, peft.write(out, experiment.model, found, self.lora, adapters, named)
