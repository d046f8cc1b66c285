"""Stored tensors and arrays of the tree: which tensor holds what, by one reversible line each."""

import difflib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxlm.core.errors import InputError
from jaxlm.families.kept_matrix import KeptMatrices, KeptMatrix
from jaxlm.families.pattern import Pattern
from jaxlm.families.quantized.scaled import ScaledTensor
from jaxlm.families.rule import TensorRule, named_kinds, part_of
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.quantizing import Quantizer
from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.host_shards import HostShards
from jaxlm.parallel.rules import Rules

_STACK, _MIXER = "layers", "attention"
_READ = ("BF16", "F16", "F32", "F64")  # a quantized tensor means nothing without its scales
_FETCHED = 2**26  # bytes of experts that are fetched from devices at a time
_SHOWN = 6  # differences in a message, at most


@dataclass(frozen=True)
class TensorPlace:
    """An array of the tree, or one layer of a stack, or one expert of a layer; of its last dimension the part from
    `start` to `end`."""

    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    start: int | None = None
    end: int | None = None

    @property
    def begin(self) -> tuple[int, ...]:
        """The indices of the place's first element in the array of the tree."""
        return (*self.index, *(0 for _ in self.shape[1:]), self.start or 0)


@dataclass(frozen=True)
class TensorBinding:
    """A stored tensor by name, and the places of its elements in the tree."""

    name: str
    places: tuple[TensorPlace, ...]
    pattern: Pattern | None
    is_state: bool = False  # and float32, whatever the parameters are

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is stored."""
        shapes = [place.shape for place in self.places]
        return shapes[0] if self.pattern is None else self.pattern.stored_shape(shapes)

    def read(self, stored: np.ndarray) -> list[np.ndarray]:
        """Return the array of each place."""
        if self.pattern is None:
            return [stored]
        return self.pattern.read(stored, [place.shape for place in self.places])

    def write(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the stored tensor for the arrays of all places."""
        return arrays[0] if self.pattern is None else self.pattern.write(arrays)


def tensors(model: ModelConfig, rules: Sequence[TensorRule]) -> dict[str, TensorBinding]:
    """Return the tensors that a model is stored as, by name.

    A rule applies to the layers that have the rule's arrays: a layer without a bias has no tensor for the bias. A rule
    with {e} is of layers with experts, and so is one whose pattern has an axis for them: its tensor holds those of a
    layer. Paths with a kind of attention in place of `attention` are of layers of that kind, and the others then of
    layers of other kinds. Axes of a pattern may be named as keys of a layer's attention, such as `num_key_heads`, for
    their sizes. Raises ValueError if an array of the tree is in no rule, or in two rules.
    """
    graph, abstract = model_tree.abstract(model)
    declared = model_tree.paths(model_tree.dimensions(abstract))
    stacks = _stacks(graph, abstract)
    bindings: dict[str, TensorBinding] = {}
    kinds = named_kinds(rules)
    for rule in rules:
        for layer, (prefix, index) in enumerate(stacks) if "{l}" in rule.name else [(0, (_STACK, ()))]:
            attention = model.layers[layer].attention
            mixer = attention.kind if attention.kind in kinds else _MIXER
            others = {_MIXER, *kinds} - {mixer}
            paths = [path.replace(f"/{mixer}/", f"/{_MIXER}/", 1) for path in rule.paths if part_of(path) not in others]
            named = [path.replace(_STACK, prefix, 1) if _is_stack(path) else path for path in paths]
            of = [declared[path] for name in named if (path := name.partition("[")[0]) in declared]
            if not of or not _applies(rule, of[0], len(index)):
                continue
            pattern = rule.pattern and rule.pattern.with_sizes(dict(attention))
            for expert in range(of[0].shape[1]) if "{e}" in rule.name else [None]:
                at = index if expert is None else (*index, expert)
                places = tuple(_place(name, at, declared, model.layers[layer].rope_dim) for name in named)
                name = rule.name.replace("{l}", str(layer)).replace("{e}", str(expert))
                if name in bindings:
                    raise ValueError(f"two rules name {name}")
                bindings[name] = TensorBinding(name, places, pattern, of[0].is_state)
    places = [place for binding in bindings.values() for place in binding.places if not place.start]
    covered = Counter(
        (place.path, (*place.index, *expert))
        for place in places
        for expert in itertools.product(*_stacked(place.path, declared)[len(place.index) :])
    )
    whole = Counter((path, at) for path in declared for at in itertools.product(*_stacked(path, declared)))
    if covered != whole:
        left = sorted({path for path, _ in (whole - covered) + (covered - whole)})
        raise ValueError(f"no rule, or more than one, for {', '.join(left)}")
    return bindings


def matrices(model: ModelConfig) -> int:
    """Return the number of arrays of single layers and, in a mixture, of single experts, without listing them."""
    declared = model_tree.paths(model_tree.dimensions(model_tree.abstract(model)[1]))
    return sum(math.prod(d.shape[i] for i in d.stack) for path, d in declared.items() if _is_stack(path))


def _applies(rule: TensorRule, array: Dimensions, stacked: int) -> bool:
    """Return whether a rule may be of layers with this array, the first `stacked` axes of which count layers."""
    if "{e}" in rule.name or rule.pattern is None:
        return array.of_experts == ("{e}" in rule.name)
    return rule.pattern.rank == len(array.shape) - stacked


def _stacked(path: str, declared: Mapping[str, Dimensions]) -> list[range]:
    """Return the indices of an array's layers, and of the experts of a layer."""
    return [range(declared[path].shape[i]) for i in declared[path].stack] if _is_stack(path) else []


def _place(name: str, index: tuple[int, ...], declared: Mapping[str, Dimensions], rotated: int) -> TensorPlace:
    """Return the place of a path, with [rotated] or [rest] for the channels of a head that rotate, or do not."""
    path, _, part = name.removesuffix("]").partition("[")
    *shape, last = declared[path].shape[len(index) :]
    ends = {"": (None, None), "rotated": (None, rotated), "rest": (rotated, None)}[part]
    return TensorPlace(path, index, (*shape, len(range(last)[slice(*ends)])), *ends)


def _is_stack(path: str) -> bool:
    return path.startswith(f"{_STACK}/")


def _stacks(graph: nnx.GraphDef, abstract: nnx.State) -> list[tuple[str, tuple[int, ...]]]:
    """Return the path of each layer's stack and the layer's index in it."""
    groups = nnx.merge(graph, abstract).groups.stacks
    found = {
        layer: (_STACK if len(groups) == 1 else f"{_STACK}/{name}", (i,))
        for name, layers in groups
        for i, layer in enumerate(layers)
    }
    return [found[layer] for layer in sorted(found)]


def check(
    expected: Mapping[str, TensorBinding],
    stored: Mapping[str, StoredTensor | LazyTensor],
    known: Collection[str],
    where: str,
) -> None:
    """Raise InputError unless the stored tensors are the expected ones, with the expected shapes, and perhaps `known`
    others. The message lists the differences."""
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected and name not in known]
    strange = [name for name in extra if 0 not in stored[name].shape]  # what has no elements says nothing
    wrong = []
    for name in missing:
        near = difflib.get_close_matches(name, strange, 1) if len(wrong) < _SHOWN else ()  # which takes long
        wrong.append(f"{name} is missing" + (f" (there is {near[0]})" if near else ""))
    wrong += [f"{name} is none of the model's" for name in strange]
    for name, binding in expected.items():
        if name in stored and stored[name].shape != binding.shape:
            wrong.append(f"{name} is {list(stored[name].shape)}, and the configuration says {list(binding.shape)}")
        elif name in stored and stored[name].dtype_name not in _READ:
            wrong.append(f"{name} is {stored[name].dtype_name}, and a parameter is one of {', '.join(_READ)}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise InputError(f"{where}: {'; '.join(wrong[:_SHOWN])}{more}")


def load(
    model: ModelConfig,
    expected: Mapping[str, TensorBinding],
    stored: Mapping[str, StoredTensor | LazyTensor],
    mesh: Mesh,
    rules: Rules,
    dtype: jax.typing.DTypeLike | None,
    quantized: Quantization | None = None,
) -> Tree:
    """Return the parameters, sharded on a mesh. Each stored tensor is read once, into the shards of this process's
    devices; an array goes to its devices as soon as all of its tensors are read.

    Of a tensor in a file, only the pages with elements of this process's shards are read: whole rows of the tensor, or
    a part of each row. A quantized tensor is read whole, and so is one whose pattern interleaves axes (rotary pairs).

    Args:
      dtype: the dtype to cast to; None keeps the stored dtype of each array (for a stack, of its first layer). State
        is float32.
      quantized: the form of the matrices of layers. Those that are stored in it are kept as they are; others are
        quantised as soon as they are read, from what is stored.
    """
    _, abstract = model_tree.abstract(model)
    quantizer = None if quantized is None else Quantizer(model, quantized, mesh, rules, dtype)
    matrices = None if quantized is None else KeptMatrices(model, quantized, mesh, rules)
    are_kept = frozenset() if quantized is None else kept(model, expected, stored, quantized)
    shapes = model_tree.paths(model_tree.shapes(abstract))
    shardings = model_tree.shardings(abstract, mesh, rules)
    sharding_of = model_tree.paths(shardings)
    missing = Counter(place.path for binding in expected.values() for place in binding.places)
    filled: dict[str, HostShards | KeptMatrix] = {}
    arrays: dict[str, jax.Array] = {}
    for binding in expected.values():  # all layers of a rule, then the next: few arrays are filled at a time
        for place, *pieces in _pieces(binding, stored[binding.name], are_kept):
            path = place.path
            if path not in filled and matrices is not None and path in are_kept:
                filled[path] = matrices.matrix(path)
            elif path not in filled:
                as_stored = dtype is None or (quantizer is not None and quantizer.reads(path))
                to = jax.dtypes.canonicalize_dtype(pieces[0].dtype if as_stored else dtype)
                to = np.dtype(np.float32) if binding.is_state else to
                filled[path] = HostShards(shapes[path].shape, to, sharding_of[path])
            filled[path].fill(place.begin, *(piece[(None,) * len(place.index)] for piece in pieces))
            missing[path] -= 1
            if not missing[path]:
                whole = filled.pop(path).on_devices()
                if path in are_kept:
                    arrays |= {f"{path}/{name}": part for name, part in whole.items()}
                else:
                    arrays |= {path: whole} if quantizer is None else quantizer.parts(path, whole)
    if quantizer is not None:
        return quantizer.joined(arrays)
    return jax.tree.unflatten(jax.tree.structure(shardings), [arrays[path] for path in sharding_of])


def kept(
    model: ModelConfig,
    expected: Mapping[str, TensorBinding],
    stored: Mapping[str, StoredTensor | LazyTensor],
    form: Quantization,
) -> frozenset[str]:
    """Return the paths of the matrices that a form quantises and all tensors of which are stored in it."""
    declared = model_tree.paths(model_tree.dimensions(model_tree.abstract(model)[1]))
    quantised = quantizable(model, form)
    fits: dict[str, bool] = {}
    for binding in expected.values():
        tensor = stored[binding.name]
        for place in binding.places:
            of = declared[place.path]
            inputs = math.prod(of.shape[i] for i in of.inputs)
            is_stored_so = isinstance(tensor, ScaledTensor) and tensor.fits(form, inputs)
            fits[place.path] = is_stored_so and fits.get(place.path, True)
    return frozenset(path for path in quantised if fits[path])


def quantizable(model: ModelConfig, form: Quantization) -> frozenset[str]:
    """Return the paths of the matrices that a form quantises."""
    plain, tree = (model_tree.shapes(model_tree.abstract(model, quantized=each)[1]) for each in (None, form))
    return frozenset(model_tree.paths(plain).keys() - model_tree.paths(tree).keys())


def _pieces(
    binding: TensorBinding, tensor: StoredTensor | LazyTensor, kept: Collection[str]
) -> Iterator[tuple[TensorPlace, *tuple[np.ndarray, ...]]]:
    """Yield each place with its numbers, or with the numbers and scales that are kept there."""
    are_kept = [place.path in kept for place in binding.places]
    if isinstance(tensor, ScaledTensor) and any(are_kept):
        for place, numbers, scales in zip(binding.places, *map(binding.read, tensor.parts()), strict=True):
            if place.path in kept:
                yield place, numbers, scales
    if not all(are_kept):
        for place, numbers in zip(binding.places, binding.read(tensor.read()), strict=True):
            if place.path not in kept:
                yield place, numbers


def unwritten(
    expected: Mapping[str, TensorBinding], parameters: Tree, dtype_of: Mapping[str, np.dtype]
) -> dict[str, LazyTensor]:
    """Return the tensors of parameters in these dtypes, state in float32, each computed only when it is written."""
    leaves = model_tree.paths(parameters)
    fetched: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}  # the last experts, of which a call takes several

    def dtype(binding: TensorBinding) -> np.dtype:
        return np.dtype(np.float32) if binding.is_state else dtype_of[binding.name]

    def make(binding: TensorBinding) -> np.ndarray:
        return binding.write([array(place) for place in binding.places]).astype(dtype(binding), copy=False)

    def array(place: TensorPlace) -> np.ndarray:
        leaf = leaves[place.path]
        if len(place.index) > 1:
            *_, expert = place.index
            count = _experts_at_once(leaf)
            first = (*place.index[:-1], expert - expert % count)
            if (place.path, first) not in fetched:
                fetched.clear()
                fetched[place.path, first] = jax.device_get(_experts(leaf, first, count))
            whole = fetched[place.path, first][expert % count]
        else:
            whole = jax.device_get(leaf[place.index] if place.index else leaf)
        return np.asarray(whole)[..., place.start : place.end]

    return {
        name: LazyTensor(dtype(binding), binding.shape, lambda binding=binding: make(binding))
        for name, binding in expected.items()
    }


def _experts_at_once(leaf: jax.Array) -> int:
    """Return a divisor of the number of experts in an array [layers, experts, …]: as many as have `_FETCHED` bytes."""
    _, experts, *matrix = leaf.shape
    most = _FETCHED // (leaf.dtype.itemsize * math.prod(matrix))
    return max((n for n in range(1, experts + 1) if experts % n == 0 and n <= most), default=1)


@functools.partial(jax.jit, static_argnames="count")
def _experts(leaf: jax.Array, first: tuple[int, int], count: int) -> jax.Array:
    """Return `count` experts of a layer, [count, …]: one program for all layers."""
    sizes = (1, count, *leaf.shape[2:])
    return jax.lax.dynamic_slice(leaf, (*first, *(0 for _ in leaf.shape[2:])), sizes)[0]
