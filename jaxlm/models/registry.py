"""Kinds of a part of a layer: a section of the configuration, and the module that is made from it."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxlm.core.schema import Kinds
from jaxlm.models.config import LayerConfig, ModelConfig

MakeLayer = Callable[[ModelConfig, nnx.Rngs], Any]


class Registry:
    """The modules of one key of `[model]`, by the section that its `kind` selects. All sections derive from `base`."""

    def __init__(self, kinds: Kinds, base: type[LayerConfig], modules: dict[type[LayerConfig], MakeLayer]):
        self._kinds, self._base, self._modules = kinds, base, modules

    def register(self, section: type[LayerConfig], module: MakeLayer) -> None:
        """Let the `kind` of a section select a module; configurations may name it from now on.

        Args:
          section: its keys, with a `kind: Literal["NAME"] = "NAME"`.
          module: a `jaxlm.models.parameters.Module`, made of (model, rngs).

        Raises ValueError where it has no kind, where another section has its kind, or where it does not derive from the
        base of these sections.
        """
        if not issubclass(section, self._base):
            raise ValueError(f"{section.__name__} must derive from {self._base.__name__}")
        self._kinds.add(section)
        self._modules[section] = module

    def unregister(self, section: type[LayerConfig]) -> None:
        """Take a kind out that was registered."""
        self._kinds.remove(section)
        del self._modules[section]

    def make(self, section: LayerConfig, model: ModelConfig, rngs: nnx.Rngs) -> Any:
        """Return the module of a section of this model."""
        return self._modules[type(section)](model, rngs)
