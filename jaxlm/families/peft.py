"""Adapters in the format of PEFT (adapter_config.json, adapter_model.safetensors), read and written.

The table of a family says which parameters a tensor holds. A permutation of a matrix's outputs is one of B's outputs. A
tensor that holds several matrices stacks their A, and has each B in a block of its own; the tensor's rank and alpha are
those of one matrix, times the number of matrices.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.core import addresses, copies
from jaxlm.core.addresses import with_addresses
from jaxlm.core.errors import InputError
from jaxlm.core.files import building, digest
from jaxlm.data.config import HUGGING_FACE
from jaxlm.families import hub, safetensors, table
from jaxlm.families.directory import PublishedModel
from jaxlm.families.family import Family
from jaxlm.families.files import ADAPTER, ADAPTER_CONFIG, GENERATION, is_published, read_json, write_json
from jaxlm.families.rule import TensorRule
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.families.table import TensorBinding, TensorPlace
from jaxlm.models import tree as model_tree
from jaxlm.models.config import ModelConfig
from jaxlm.models.lora_config import LoraConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Dimensions, Tree
from jaxlm.parallel.rules import Rules

_PREFIX = "base_model.model."
_FACTOR = re.compile(re.escape(_PREFIX) + r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SHOWN = 4  # names in a message
# Keys that change no result where tensors are there, or that are read.
_INERT = frozenset(
    "auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern layers_to_transform lora_alpha "
    "lora_dropout megatron_core parent_library peft_type peft_version qalora_group_size r rank_pattern alpha_pattern "
    "revision runtime_config target_modules task_type use_rslora fan_in_fan_out".split()
)
_NONE = (None, False, "none", [], {})  # of another key: nothing is asked for
_INITIAL = (*_NONE, True, "gaussian", "orthogonal")  # of init_lora_weights: the others change the base


@dataclass(frozen=True)
class Adapter:
    """The adapter of a stored matrix: scale · B·A, with A [rank, in] and B [out, rank]; `transposed` where the matrix
    is stored [in, out]."""

    a: StoredTensor
    b: StoredTensor
    scale: float
    transposed: bool

    def added_to(self, matrix: np.ndarray) -> np.ndarray:
        """Return the sum with a matrix, float32."""
        product = self.scale * (self.b.read().astype(np.float32) @ self.a.read().astype(np.float32))
        return matrix.astype(np.float32) + (product.T if self.transposed else product)


class AdapterBase(NamedTuple):
    """A model that adapters are of. `rules`: of the family, for the layout that its tensors have."""

    name: str
    model: ModelConfig
    family: Family
    rules: Sequence[TensorRule]

    @classmethod
    def of(cls, published: PublishedModel) -> "AdapterBase":
        """Return that of a published model."""
        return cls(str(published), published.model, published.family, published.rules)


class PeftAdapter:
    """The adapter in a PEFT directory."""

    def __init__(self, folder: Path):
        """Take a directory with an adapter_config.json."""
        self.folder = folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json. Raises InputError for a setting that changes results and that jaxlm does
        not support."""
        file = self.folder / ADAPTER_CONFIG
        config = read_json(file)
        if config.get("peft_type") != "LORA":
            raise InputError(f"{file}: peft_type = {config.get('peft_type')!r}, and jaxlm reads LORA")
        for key, value in config.items():
            if key not in _INERT and value not in (_INITIAL if key == "init_lora_weights" else _NONE):
                raise InputError(f"{file}: {key} = {value!r}: jaxlm reads adapters without it")
        return config

    @property
    def base_name(self) -> str:
        """The name or the path of the model that it adapts; empty where the file names none."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def base_folder(self) -> Path | None:
        """The folder of the model that it adapts, from here or from the adapter's; None where it is not here."""
        name = self.base_name
        for path in (addresses.place(name), self.folder / name) if name else ():
            copies.pull(path, copies.without_weights)
            if is_published(path):
                return path
        return None

    def base(self) -> PublishedModel:
        """Return the model that it adapts: that of `base_folder`, or one of the Hub. Raises InputError without one."""
        if (found := self.base_folder) is not None:
            return PublishedModel(found)
        if not is_hub_name(self.base_name):
            raise InputError(
                f"{self.folder} adapts {self.base_name!r}, which is no Hugging Face directory; set "
                f"base_model_name_or_path in {self.folder / ADAPTER_CONFIG}"
            )
        revision = self.config.get("revision")
        of_hub = f"{HUGGING_FACE}{self.base_name}" + (f"@{revision}" if revision else "")
        return PublishedModel(hub.fetch(of_hub), of_hub)

    def adapters(self, base: AdapterBase) -> dict[str, Adapter]:
        """Return the adapters by the name of the tensor that each adapts. Raises InputError for an adapter that is
        broken or adapts no tensor of the model."""
        file, config = self.folder / ADAPTER, self.config
        if not file.is_file():
            raise InputError(f"{self.folder} has no {ADAPTER}; save the adapter as safetensors")
        declared = _matrices(base.model, base.rules)
        factors: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in safetensors.read_header(file).items():
            found = _FACTOR.fullmatch(name)
            matrix = found and base.family.renamed(f"{found['module']}.weight")
            if found is None or matrix not in declared:
                raise InputError(f"{file}: {name} is the adapter of no matrix of {base.name}")
            factors.setdefault(matrix, {})[found["factor"]] = tensor
        adapters = {}
        for name, each in factors.items():
            binding, transposed = declared[name]
            outputs, inputs = reversed(binding.shape) if transposed else binding.shape
            shapes = {factor: tensor.shape for factor, tensor in each.items()}
            rank = shapes.get("A", (0,))[0]
            if shapes != {"A": (rank, inputs), "B": (outputs, rank)} or rank == 0:
                said = ", ".join(f"{factor} {list(shape)}" for factor, shape in shapes.items())
                raise InputError(
                    f"{file}: the adapter of {name} is {said}, and should be A [r, {inputs}], B [{outputs}, r]"
                )
            alpha = self._setting("alpha_pattern", "lora_alpha", name.removesuffix(".weight"))
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            adapters[name] = Adapter(each["A"], each["B"], scale, transposed)
        return adapters

    def matrices(self, base: AdapterBase) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return float32 A [layers, *inputs, rank] and B [layers, rank, *outputs], the scale in B, by the path of the
        matrix that they adapt. Raises InputError as `adapters` does, and for one of a table."""
        declared = model_tree.paths(model_tree.dimensions(model_tree.abstract(base.model)[1]))
        tensors = _matrices(base.model, base.rules)
        by_path: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        for name, adapter in self.adapters(base).items():
            for path, layer, factors in _read(*tensors[name], adapter, declared):
                if declared[path].table:
                    raise InputError(
                        f"{self.folder / ADAPTER}: {name} is a table, which is served with no adapter beside it; serve "
                        f"{self.folder} by itself, where its adapters are added to the matrices"
                    )
                by_path.setdefault(path, {})[layer] = factors
        return {path: _stacked(layers, declared[path]) for path, layers in by_path.items()}

    def _setting(self, pattern: str, key: str, module: str) -> float:
        """Return the value for a module: of the first pattern that matches the end of the module's name, or of the
        key."""
        file = self.folder / ADAPTER_CONFIG
        try:
            for regex, value in (self.config.get(pattern) or {}).items():
                if re.match(rf"(.*\.)?({regex})$", module):
                    return float(value)
            return float(self.config[key])
        except (re.error, AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{file}: {key} and {pattern} give {module} no number ({error})") from None


class AdaptedModel(PublishedModel):
    """The model of a PEFT directory: a published one, each matrix with its adapter added."""

    def __init__(self, folder: Path, hub_name: str | None = None):
        """Take a directory with an adapter_config.json. Raises InputError if the base model that the file names is
        missing."""
        self.adapter, self._peft = folder, PeftAdapter(folder)
        self.base = self._peft.base()
        super().__init__(self.base.folder, hub_name)

    def __str__(self) -> str:
        return self.hub_name or with_addresses(self.adapter)

    @cached_property
    def stored(self) -> dict[str, StoredTensor | LazyTensor]:
        """The tensors, with adapters added, in the dtypes of the base."""
        return self._sums(wide=False)

    def _sums(self, wide: bool) -> dict[str, StoredTensor | LazyTensor]:
        """Return the tensors with adapters added, rounded to the tensors' dtypes, or in float32 if `wide`."""

        def added(name: str, tensor: StoredTensor | LazyTensor) -> StoredTensor | LazyTensor:
            if name not in self._adapters:
                return tensor
            adapter, to = self._adapters[name], np.dtype(np.float32) if wide else tensor.dtype
            return LazyTensor(
                tensor.dtype, tensor.shape, lambda: adapter.added_to(tensor.read()).astype(to, copy=False)
            )

        return {name: added(name, tensor) for name, tensor in self.base.stored.items()}

    @cached_property
    def _adapters(self) -> dict[str, Adapter]:
        return self._peft.adapters(AdapterBase.of(self.base))

    def load(
        self,
        mesh: Mesh,
        rules: Rules,
        dtype: jax.typing.DTypeLike | None = None,
        quantized: Quantization | None = None,
    ) -> Tree:
        """Return the parameters, as `PublishedModel.load` does; sums are rounded once."""
        stored = self._sums(wide=dtype is not None)
        return table.load(self.model, self.tensors, stored, mesh, rules, dtype, quantized)

    @property
    def quantization(self) -> None:
        """None: sums with adapters are in full."""

    def digest(self) -> str:
        """Return a digest of adapters and base."""
        return f"{digest([self.adapter / ADAPTER, self.adapter / ADAPTER_CONFIG])}+{self.base.digest()}"

    def dtypes(self) -> dict[str, str]:
        """Return the dtypes of the base."""
        return self.base.dtypes()

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The content of the generation_config.json beside the adapter, or else of the base's."""
        file = self.adapter / GENERATION
        return read_json(file) if file.is_file() else self.base.generation

    def remarks(self, quantization: Quantization | None = None) -> list[str]:
        """Return the base's remarks, and a line about the adapters."""
        return [*self.base.remarks(), f"{len(self._adapters)} adapters are added to {self.base}"]


def is_hub_name(name: str) -> bool:
    """Return whether a name is that of a model of the Hub, ORG/NAME."""
    return bool(_HUB.fullmatch(name))


def _matrices(model: ModelConfig, rules: Sequence[TensorRule]) -> dict[str, tuple[TensorBinding, bool]]:
    """Return the tensors that are matrices of products and may have adapters, by name, each with whether it is stored
    as [in, out]."""
    declared = model_tree.paths(model_tree.dimensions(model_tree.abstract(model)[1]))
    matrices = {}
    for name, binding in table.tensors(model, rules).items():
        of = [declared[place.path] for place in binding.places]
        if any(d.of_mixture for d in of):
            continue
        if name.endswith(".weight") and all(d.projection or (d.table and d.axes[-1] == "vocab") for d in of):
            one, two = (_narrowed(binding, declared, rank).shape for rank in (1, 2))
            matrices[name] = binding, one[0] != two[0]
    return matrices


def _narrowed(binding: TensorBinding, declared: Mapping[str, Dimensions], rank: int) -> TensorBinding:
    """Return the binding with `rank` inputs in place of each matrix's own."""

    def narrow(place: TensorPlace) -> TensorPlace:
        inputs = len(declared[place.path].inputs)
        return replace(place, shape=(rank, *(1,) * (inputs - 1), *place.shape[inputs:]))

    return TensorBinding(binding.name, tuple(map(narrow, binding.places)), binding.pattern)


def _read(
    binding: TensorBinding, transposed: bool, adapter: Adapter, declared: Mapping[str, Dimensions]
) -> Iterator[tuple[str, int, tuple[np.ndarray, np.ndarray]]]:
    """Yield path, layer and (A [*inputs, r], B [r, *outputs], with the scale) of each matrix that a tensor holds, of
    the columns of A that the matrix uses."""
    a, b = (tensor.read().astype(np.float32) for tensor in (adapter.a, adapter.b))
    second, rank = adapter.scale * b, len(a)
    narrow = _narrowed(binding, declared, rank)
    blocks = narrow.read(second.T if transposed else second)
    for path in dict.fromkeys(place.path for place in binding.places):
        of = declared[path]
        inputs, outputs = ([of.shape[i] for i in some] for some in (of.inputs, of.outputs))
        own = np.zeros((rank, *outputs), np.float32)
        for place, block in zip(narrow.places, blocks, strict=True):
            if place.path == path:
                part = own[..., place.start : place.end]
                part[...] = block.reshape(part.shape)
        used = np.flatnonzero(own.reshape(rank, -1).any(axis=1))
        layer = next(place.index for place in binding.places if place.path == path)
        if len(used):
            yield path, layer[0] if layer else 0, (a.T.reshape(*inputs, rank)[..., used], own[used])


def _stacked(layers: Mapping[int, tuple[np.ndarray, np.ndarray]], of: Dimensions) -> tuple[np.ndarray, np.ndarray]:
    """Return the adapters of a stack of layers, with zeros for layers without one and up to the greatest rank."""
    rank, count = max(len(b) for _, b in layers.values()), of.shape[of.stack[0]]
    inputs, outputs = ([of.shape[i] for i in some] for some in (of.inputs, of.outputs))
    first, second = np.zeros((count, *inputs, rank), np.float32), np.zeros((count, rank, *outputs), np.float32)
    for layer, (a, b) in layers.items():
        first[layer, ..., : len(b)], second[layer, : len(b)] = a, b
    return first, second


def _written(
    binding: TensorBinding,
    transposed: bool,
    declared: Mapping[str, Dimensions],
    leaves: Mapping[str, np.ndarray],
    rank: int,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return A [k · rank, in] and B [out, k · rank] of a tensor that holds k adapted matrices; None if k is 0."""
    paths = [path for path in dict.fromkeys(place.path for place in binding.places) if f"{path}/a" in leaves]
    if not paths:
        return None
    narrow = _narrowed(binding, declared, len(paths) * rank)
    first, blocks = [], [np.zeros(place.shape, np.float32) for place in narrow.places]
    for part, path in enumerate(paths):
        a, b = leaves[f"{path}/a"], leaves[f"{path}/b"]
        for place, block in zip(narrow.places, blocks, strict=True):
            if place.path == path:
                of_layer = b[place.index]
                rows = block[part * rank : (part + 1) * rank]
                rows[...] = of_layer[..., place.start : place.end].reshape(rows.shape)
        index = next(place.index for place in narrow.places if place.path == path)
        first.append(a[index].reshape(-1, rank).T)
    second = narrow.write(blocks)
    return np.concatenate(first), second.T if transposed else second


def write(
    folder: Path,
    model: ModelConfig,
    family: Family,
    lora: LoraConfig,
    adapters: Tree,
    base: Mapping[str, str],
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> int:
    """Write adapters as a PEFT directory, in float32, and return the number of their elements.

    Args:
      adapters: the trained tree of adapters.
      base: keys of adapter_config.json that name the model.
      beside: the contents of other files by name, such as a chat template.
    """
    leaves = {path: np.asarray(jax.device_get(leaf)) for path, leaf in model_tree.paths(adapters).items()}
    declared = model_tree.paths(model_tree.dimensions(model_tree.abstract(model)[1]))
    matrices, tensors, ranks = _matrices(model, family.rules), {}, {}
    for name, (binding, transposed) in matrices.items():
        factors = _written(binding, transposed, declared, leaves, lora.rank)
        if factors is None:
            continue
        module = name.removesuffix(".weight")
        ranks[module] = len(factors[0])
        for letter, factor in zip("AB", factors, strict=True):
            tensors[f"{_PREFIX}{module}.lora_{letter}.weight"] = LazyTensor(
                np.dtype(np.float32), factor.shape, lambda factor=factor: factor
            )
    modules = [name.removesuffix(".weight") for name in matrices]
    fused = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none", "lora_dropout": 0.0},
        **base,
        "r": lora.rank,
        "lora_alpha": _whole(lora.alpha),
        "use_rslora": lora.rank_stabilized,
        "fan_in_fan_out": any(transposed for name, (_, transposed) in matrices.items()),
        "target_modules": sorted(_short(set(ranks), modules)),
        "rank_pattern": {re.escape(key): fused[some] for key, some in _named(fused, ranks, modules)},
        "alpha_pattern": {
            re.escape(key): _whole(lora.scale * (math.sqrt(fused[some]) if lora.rank_stabilized else fused[some]))
            for key, some in _named(fused, ranks, modules)
        },
    }
    with building(folder) as partial:
        write_json(partial / ADAPTER_CONFIG, config)
        safetensors.write(partial / ADAPTER, tensors, {"format": "pt"})
        for file_name, content in beside.items():
            (partial / file_name).write_bytes(content)
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def _whole(value: float) -> float:
    """Return a number as an integer if it is one, as PEFT writes its own numbers."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value


def _short(chosen: set[str], modules: list[str]) -> set[str]:
    """Return PEFT's names for these modules: the last part of a name if no other module has that last part, else the
    whole name."""
    others = {module.rpartition(".")[2] for module in modules if module not in chosen}
    last = {module: module.rpartition(".")[2] for module in chosen}
    return {module if last[module] in others else last[module] for module in chosen}


def _named(fused: Mapping[str, int], ranks: Mapping[str, int], modules: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the names for modules of one rank, shortened, and one of the modules."""
    for rank in sorted(set(fused.values())):
        chosen = {module for module in fused if fused[module] == rank}
        rest = [module for module in modules if module in ranks]
        for key in sorted(_short(chosen, rest)):
            yield key, next(module for module in chosen if module == key or module.endswith(f".{key}"))
