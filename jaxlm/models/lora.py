"""LoRA as a change of a model's modules: matrices with adapters, which alone are trained, and their sum."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from flax import nnx

from jaxlm.core.errors import InputError
from jaxlm.models.adapted_matrix import AdaptedMatrix
from jaxlm.models.adapter_set import AdapterSet
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.multi_adapted_matrix import MultiAdaptedMatrix
from jaxlm.models.parameters import Module, stack
from jaxlm.models.quantized_matrix import QuantizedMatrix
from jaxlm.models.replaced import at_path, replaced
from jaxlm.models.transformer import Transformer

_ALL = "*"  # all matrices that may have adapters
_SHOWN = 4  # paths in a message


def targets(
    settings: LoraConfig, matrices: Sequence[str], mixtures: Iterable[str], others: Iterable[str]
) -> tuple[str, ...]:
    """Return the matrices that have adapters, of the paths of a model's matrices.

    Raises InputError for a pattern that matches none of them, or, unless it is "*", one of `mixtures`: the matrices of
    experts and routers. `others` are the paths of other parameters.
    """
    for i, pattern in enumerate(settings.targets):
        if pattern != _ALL and (refused := [path for path in mixtures if fnmatchcase(path, pattern)]):
            raise InputError(
                f"lora.targets[{i}] = {pattern!r}: {refused[0]} is of experts or their router, which have no adapters; "
                f"take patterns of other matrices, such as {', '.join(matrices[:_SHOWN])}"
            )
        if any(fnmatchcase(path, pattern) for path in matrices):
            continue
        wrong = [path for path in others if fnmatchcase(path, pattern)]
        near = difflib.get_close_matches(pattern, matrices, _SHOWN, cutoff=0.4) or matrices[:_SHOWN]
        why = f"{wrong[0]} is no matrix of a layer" if wrong else "it matches no parameter"
        raise InputError(f"lora.targets[{i}] = {pattern!r}: {why}; adapters go with {', '.join(near)}")
    return tuple(path for path in matrices if any(fnmatchcase(path, pattern) for pattern in settings.targets))


def adapt(module: Transformer, settings: LoraConfig | AdapterSet, paths: Sequence[str], rngs: nnx.Rngs) -> Transformer:
    """Give the matrices of a model at these paths an adapter each, or those of a set, and return it."""

    def adapted(rngs: nnx.Rngs) -> Callable[[nnx.Param | QuantizedMatrix], AdaptedMatrix]:
        return lambda base: _adapted(base, settings, rngs)

    return replaced(module, paths, adapted(rngs), in_blocks=lambda base: adapted(nnx.Rngs(0))(base))


def _adapted(base: nnx.Param | QuantizedMatrix, settings: LoraConfig | AdapterSet, rngs: nnx.Rngs) -> AdaptedMatrix:
    """Return a matrix with an adapter, or with those of a set, or a stack of such matrices."""
    stacked = base.axes.count("layers")
    inputs, axes, shape = len(base.inputs), base.axes[stacked:], base.shape[stacked:]

    def make(rngs: nnx.Rngs) -> AdaptedMatrix:
        if isinstance(settings, AdapterSet):
            return MultiAdaptedMatrix(shape, axes, inputs, settings.owners, rngs)
        return AdaptedMatrix(shape, axes, inputs, settings.rank, settings.scale, rngs)

    matrix = stack(make, base.shape[0], rngs) if stacked else make(rngs)
    matrix.base = base if isinstance(base, Module) else nnx.Param(base[...], axes=base.axes, inputs=base.inputs)
    return matrix


def widen(module: Transformer) -> Transformer:
    """Put float32 numbers in the place of each quantised matrix, and return the module, which is none to run any
    more."""
    for path, node in list(nnx.iter_graph(module)):
        if isinstance(node, QuantizedMatrix):
            setattr(at_path(module, path[:-1]), str(path[-1]), nnx.Param(node.widened()))
    return module


def merge(module: Transformer) -> Transformer:
    """Put the sum W + scale · A·B in the place of each adapted matrix, in the dtype of W or float32 of one that is
    quantised, as those without adapters become then, and return the module.

    It is computed in float32. The module is none to run any more, since its layers are described as adapted ones.
    """
    for path, node in list(nnx.iter_graph(module)):
        if isinstance(node, AdaptedMatrix):
            setattr(at_path(module, path[:-1]), str(path[-1]), nnx.Param(node.sum()))
    return widen(module)
