"""The mesh of an experiment. Imports no JAX."""

from typing import Any, Literal

from pydantic import Field, create_model

from jaxlm.core.errors import InputError
from jaxlm.core.schema import Count, Section
from jaxlm.parallel.layout import AXES, Layout

ALL = "all"


class MeshSection(Section):
    """Devices along each axis of the mesh. An axis of "all" takes the devices that the others leave."""

    def sizes(self) -> dict[str, int | Literal["all"]]:
        """Return the size of each axis as given."""
        return {axis: getattr(self, axis) for axis in type(self).model_fields}

    def least(self) -> Layout:
        """Return the smallest layout: axes of "all" have one device."""
        return Layout({axis: 1 if size == ALL else size for axis, size in self.sizes().items()})

    def layout(self, devices: int) -> Layout:
        """Return the layout on this many devices. Raises InputError where it does not fit them."""
        rest = [axis for axis, size in self.sizes().items() if size == ALL]
        if len(rest) > 1:
            named = " and ".join(f"mesh.{axis}" for axis in rest)
            raise InputError(f'{named} are both "all"; set one of them to a number')
        layout = self.least()
        others = " × ".join(f"mesh.{axis}" for axis, size in layout.items() if size > 1)
        if rest:
            share, over = divmod(devices, layout.size)
            if over or not share:
                raise InputError(
                    f"{others} = {layout.size} does not divide {devices} devices; "
                    f"change one of them, or set mesh.{rest[0]}"
                )
            layout = layout.replace(**{rest[0]: share})
        if layout.size > devices:
            raise InputError(
                f"the mesh needs {others} = {layout.size} devices, and there {'is' if devices == 1 else 'are'} "
                f"{devices}; lower one of them"
            )
        return layout


# The default and the meaning of each axis.
_AXES: dict[str, tuple[int | str, str]] = {
    "pipeline": (
        1,
        "Stages, each with as many of the layers, through which microbatches pass; shards of the vocabulary.",
    ),
    "data": (1, "Replicas of the model, each with a share of the batch."),
    "fsdp": (
        ALL,
        'Shards of parameters, optimizer state and batch. In training with mesh.data = 1, "all" are as many as divide '
        "the model: mesh.data takes the other devices.",
    ),
    "expert": (
        1,
        "Shards of the experts of a mixture; elsewhere more shards of parameters, optimizer state and batch.",
    ),
    "context": (1, "Shards of each sequence; in inference of the rows of prompts that a step reads."),
    "tensor": (1, "Shards of each layer."),
}
_FIELDS: dict[str, Any] = {
    axis: (Count | Literal["all"], Field(_AXES[axis][0], description=_AXES[axis][1])) for axis in AXES
}
MeshConfig = create_model(
    "MeshConfig",
    __base__=MeshSection,
    __doc__=MeshSection.__doc__,
    **_FIELDS,
)
