"""Modules in the place of some matrices of a model: of its stacks, and of the blocks that run them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from flax import nnx

from jaxlm.models.parameters import Module
from jaxlm.models.transformer import Transformer

_Changed = TypeVar("_Changed", bound=Module)


Make = Callable[[Any], Module]


def replaced(module: Transformer, paths: Sequence[str], make: Make, in_blocks: Make | None = None) -> Transformer:
    """Put make(matrix) in the place of the matrices of a model at these paths, and return it.

    `in_blocks`: makes those of the blocks of layers, as shapes; `make` by default.
    """
    groups = module.groups
    stacks = {groups.blocks[layer]: name for name, layers in groups.stacks for layer in layers}
    names = ["layers" if stacks[block] == "layers" else f"layers/{stacks[block]}" for block, _ in groups.graphs]

    def blocks() -> tuple[Module, ...]:
        named = zip(groups.distinct(module.layers), names, strict=True)
        return tuple(_replaced(block, _below(paths, name), in_blocks or make) for block, name in named)

    graphs = map(nnx.graphdef, nnx.eval_shape(blocks))
    module.groups = replace(groups, graphs=tuple(zip(dict(groups.graphs), graphs, strict=True)))
    return _replaced(module, paths, make)


def at_path(module: Any, path: Sequence[Any]) -> Any:
    """Return what is at a path below a module."""
    for part in path:
        module = module[part] if isinstance(module, Mapping | nnx.Dict | nnx.List) else getattr(module, part)
    return module


def _below(paths: Iterable[str], name: str) -> list[str]:
    return [path.removeprefix(f"{name}/") for path in paths if path.startswith(f"{name}/")]


def _replaced(module: _Changed, paths: Sequence[str], make: Make) -> _Changed:
    for path in paths:
        *above, name = path.split("/")
        parent = at_path(module, above)
        setattr(parent, name, make(getattr(parent, name)))
    return module
