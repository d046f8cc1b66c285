"""Parts by kind: a section of the configuration, and what is made from it. Imports no JAX."""

from typing import Generic, TypeVar

from jaxlm.core.schema import Kinds, Section

Maker = TypeVar("Maker")


class Registry(Generic[Maker]):
    """The makers of parts of one key of the configuration, by `kind`. All its sections derive from `base`."""

    def __init__(self, kinds: Kinds, base: type[Section], makers: dict[type[Section], Maker]):
        self._kinds, self._base, self._makers = kinds, base, makers

    def register(self, section: type[Section], maker: Maker) -> None:
        """Let the `kind` of a section select the maker of a part; configurations may name it from now on.

        Args:
          section: its keys, with a `kind: Literal["NAME"] = "NAME"`.
          maker: makes the part; the package of the part says of what.

        Raises ValueError where it has no kind, where another section has its kind, or where it does not derive from the
        base of these sections.
        """
        if not issubclass(section, self._base):
            raise ValueError(f"{section.__name__} must derive from {self._base.__name__}")
        self._kinds.add(section)
        self._makers[section] = maker

    def unregister(self, section: type[Section]) -> None:
        """Take a kind out that was registered."""
        self._kinds.remove(section)
        del self._makers[section]

    def of(self, section: Section) -> Maker:
        """Return the maker of the part that a section selects."""
        return self._makers[type(section)]
