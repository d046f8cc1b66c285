"""A Hugging Face directory: its config.json, its tensors, and the small files beside them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.core import copies
from jaxlm.core.addresses import with_addresses
from jaxlm.core.errors import InputError
from jaxlm.core.files import building, digest
from jaxlm.families import hub, quantized, safetensors, sparse_layers, table
from jaxlm.families.family import Family, named
from jaxlm.families.files import CONFIG, GENERATION, INDEX, SINGLE, read_json, shards, text_of, write_json
from jaxlm.families.rule import TensorRule, matching
from jaxlm.families.safetensors import LazyTensor, StoredTensor
from jaxlm.families.settings import config_of, family_of, inert_keys, model_of
from jaxlm.models.config import ModelConfig
from jaxlm.models.quantize_config import Quantization
from jaxlm.models.tree import Tree, parameter_count
from jaxlm.parallel.rules import Rules

_SHARD_BYTES = 5_000_000_000
# Matrices of layers and experts that are listed whatever the files hold; the largest published models have 70,000.
_LISTED = 2**17


class PublishedModel:
    """A model in a Hugging Face directory. Files are read on first use, and checked before use.

    For a model of the Hub, named `hub_name`, the folder has the small files, and safetensors are fetched on first use;
    those of a folder in a bucket are copied then.
    """

    adapter: Path | None = None  # the folder of an adapter that is added to the tensors

    def __init__(self, folder: Path, hub_name: str | None = None):
        self.folder, self.hub_name = folder, hub_name

    def __str__(self) -> str:
        return self.hub_name or with_addresses(self.folder)

    @property
    def path(self) -> Path:
        """The file or folder that the model was opened by."""
        return self.adapter or self.folder

    @cached_property
    def _whole_config(self) -> dict[str, Any]:
        return read_json(self.folder / CONFIG)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json, or its part for the text model. Raises InputError if config.json is not valid."""
        return dict(text_of(self._whole_config))

    @property
    def family(self) -> Family:
        """The family. Raises InputError for a family that jaxlm does not have."""
        return named(self.config.get("model_type"), str(self.folder / CONFIG))

    @cached_property
    def model(self) -> ModelConfig:
        """The architecture. Raises InputError as `model_of` does."""
        return model_of(self._whole_config, str(self.folder / CONFIG))

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty where there is none."""
        file = self.folder / GENERATION
        return read_json(file) if file.is_file() else {}

    @cached_property
    def stored(self) -> dict[str, StoredTensor | LazyTensor]:
        """The tensors of the text model, by the family's names. Raises InputError for a missing or broken file."""
        return {name: tensor for name, tensor in self._named.items() if name not in self._left_out}

    @cached_property
    def _named(self) -> dict[str, StoredTensor | LazyTensor]:
        stored: dict[str, str] = {}
        for name in self._dequantized:
            if (other := stored.setdefault(self.family.renamed(name), name)) != name:
                raise InputError(f"{self.folder} has {other} and {name}, which are two names of one tensor")
        return {name: self._dequantized[stored_name] for name, stored_name in stored.items()}

    @cached_property
    def _left_out(self) -> list[str]:
        """The tensors of pictures and the like, whose names begin with no prefix of the text model."""
        if "text_config" not in self._whole_config:
            return []
        same = [name for name, stored in zip(self._named, self._dequantized, strict=True) if name == stored]
        known = self._expected.keys() | self.family.copies.keys()
        return [name for name in same if name not in known and not name.startswith(self._mtp_prefixes)]

    @cached_property
    def _dequantized(self) -> dict[str, StoredTensor | LazyTensor]:
        return quantized.dequantized(self._files, quantized.packing(self._whole_config, str(self.folder / CONFIG)))

    @cached_property
    def _files(self) -> dict[str, StoredTensor]:
        """All tensors by name, of the one file or else of the index, as in transformers. Raises InputError for a file
        that is missing or broken."""
        if self.hub_name is not None:
            hub.fetch_weights(self.hub_name, self.folder)
        copies.pull_missing(self.folder)
        if (self.folder / SINGLE).is_file():
            return safetensors.read_header(self.folder / SINGLE)
        if (self.folder / INDEX).is_file():
            names = shards(self.folder)
            headers = {file: safetensors.read_header(self._shard(file)) for file in dict.fromkeys(names.values())}
            lost = [name for name, file in names.items() if name not in headers[file]]
            if lost:
                raise InputError(f"{self.folder / INDEX} names {lost[0]}, which is not in {names[lost[0]]}")
            return {name: headers[file][name] for name, file in names.items()}
        old = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in self.folder.glob(pattern)]
        why = (
            f"has {old[0]}, which may run code when it is read; convert it to safetensors" if old else "has no tensors"
        )
        raise InputError(f"{self.folder} {why}: jaxlm reads {SINGLE} or {INDEX}")

    def _shard(self, name: str) -> Path:
        if not (self.folder / name).is_file():
            raise InputError(f"{self.folder} has no {name}, which its index names")
        return self.folder / name

    @cached_property
    def _expected(self) -> dict[str, table.TensorBinding]:
        """The tensors that config.json asks for. Raises InputError, before it lists them, where these are very many and
        the files hold fewer numbers."""
        if table.matrices(self.model) > _LISTED:
            asked, held = parameter_count(self.model), sum(math.prod(each.shape) for each in self._named.values())
            if asked > held:
                raise InputError(
                    f"{self.folder}: {CONFIG} describes {asked:,} parameters, and {len(self._named):,} tensors hold "
                    f"{held:,}: check its numbers of layers and experts"
                )
        return table.tensors(self.model, self.rules)

    @cached_property
    def tensors(self) -> dict[str, table.TensorBinding]:
        """The tensors of the model by name. Raises InputError unless the files store exactly these tensors, with these
        shapes, and `dropped` ones."""
        expected = self._expected
        table.check(expected, self.stored, self.dropped, str(self.folder))
        for copy, of in self.family.copies.items():
            if copy in self.stored and copy not in expected and of in expected:
                if not np.array_equal(self.stored[copy].read(), self.stored[of].read()):
                    raise InputError(f"{self.folder}: {copy} is not {of}, and config.json ties them")
        return expected

    @property
    def rules(self) -> tuple[TensorRule, ...]:
        """The rules for the layout of the tensors."""
        return self.family.rules_of(self._named)

    @property
    def dropped(self) -> list[str]:
        """The stored tensors that are no parameters, or copies of others."""
        copies = [name for name in self.family.copies if name in self.stored and self.model.tied_embeddings]
        others = *copies, *self._spare_biases, *self._left_out, *self.mtp_tensors
        return [*matching(self.stored, self.family.dropped), *others]

    @property
    def _spare_biases(self) -> list[str]:
        """The biases of zeros that some writers give to each quantized matrix, where the model has none."""
        spare = [name for name in self.stored if name.endswith(".bias") and name not in self._expected]
        matrices = {name: self.stored.get(f"{name.removesuffix('bias')}weight") for name in spare}
        quantized = [name for name, matrix in matrices.items() if isinstance(matrix, LazyTensor)]
        return [name for name in quantized if not self.stored[name].read().any()]

    @cached_property
    def mtp_tensors(self) -> dict[str, StoredTensor | LazyTensor]:
        """The tensors of layers after the last, which predict tokens further ahead, by name (multi-token prediction,
        arXiv:2412.19437, section 2.2). jaxlm computes nothing with them."""
        return {name: tensor for name, tensor in self.stored.items() if name.startswith(self._mtp_prefixes)}

    @cached_property
    def _mtp_prefixes(self) -> tuple[str, ...]:
        """The beginnings of the names of `mtp_tensors`."""
        known, last = {**self.family.defaults, **self.config}, self.model.num_layers
        counts = [(start, known.get(key) or 0 if "{l}" in start else 1) for key, start in self.family.further.items()]
        return tuple(start.replace("{l}", str(last + i)) for start, count in counts for i in range(count))

    @cached_property
    def quantization(self) -> Quantization | None:
        """The form in which matrices of layers are stored, where they can be kept in it without rounding a number; None
        for weights that are not quantized, or that are widened. Raises InputError as `tensors`."""
        form = quantized.quantization(self._whole_config, str(self.folder / CONFIG))
        if form is None:
            return None
        kept = table.kept(self.model, self.tensors, self.stored, form)
        if kept == table.quantizable(self.model, form):
            return form
        return form._replace(targets=tuple(sorted(kept))) if kept else None

    def load(
        self,
        mesh: Mesh,
        rules: Rules,
        dtype: jax.typing.DTypeLike | None = None,
        quantized: Quantization | None = None,
    ) -> Tree:
        """Return the parameters, sharded on a mesh, in a dtype or each in its own, matrices of layers perhaps
        quantised: those that are stored so are kept as they are. Raises InputError as `tensors`."""
        return table.load(self.model, self.tensors, self.stored, mesh, rules, dtype, quantized)

    def digest(self) -> str:
        """Return a digest of the model's tensor files. Raises InputError if a file is missing."""
        files = {tensor.file for tensor in self._files.values()}
        return digest(sorted(files))

    def dtypes(self) -> dict[str, str]:
        """Return the most frequent dtype under "", and the dtype of each tensor with another one by name: the name that
        an export has."""
        stored = {
            (place.path, place.index): self.stored[name].dtype_name
            for name, binding in self.tensors.items()
            for place in binding.places
        }
        written = {name: binding.places[0] for name, binding in table.tensors(self.model, self.family.rules).items()}
        each = {  # where a tensor holds all experts of a layer, they have its dtype
            name: stored.get((place.path, place.index)) or stored[place.path, place.index[:1]]
            for name, place in written.items()
        }
        [(usual, _)] = Counter(each.values()).most_common(1)
        return {"": usual, **{name: dtype for name, dtype in each.items() if dtype != usual}}

    def kept(self, form: Quantization | None) -> list[str]:
        """Return the tensors that are kept as they are stored where matrices of layers are in a form."""
        paths = frozenset() if form is None else table.kept(self.model, self.tensors, self.stored, form)
        return [name for name, each in self.tensors.items() if paths.issuperset(place.path for place in each.places)]

    def remarks(self, quantization: Quantization | None = None) -> list[str]:
        """Return a line about each kind of tensor that is converted or left out when the model is read, its matrices in
        this form, and about the keys of config.json that change nothing."""
        kept = self.kept(quantization)
        widened = [name for name in self.tensors.keys() - kept if isinstance(self.stored[name], LazyTensor)]
        lines = say_widths(len(kept), quantization, Counter(self.stored[name].dtype.name for name in widened))
        if dropped := [name for name in self.dropped if name not in self.mtp_tensors]:
            lines.append(f"{len(dropped)} tensors are no parameters and are not read, {dropped[0]} for one")
        if self.mtp_tensors:
            lines.append(
                f"{len(self.mtp_tensors)} tensors are of layers for multi-token prediction, after layer "
                f"{self.model.num_layers - 1}: nothing is computed with them, and an import keeps them for an export"
            )
        if (self.folder / SINGLE).is_file() and (self.folder / INDEX).is_file():
            lines.append(f"{SINGLE} is read, and not {INDEX} beside it with its shards")
        keys = inert_keys(self._whole_config, str(self.folder / CONFIG))
        if keys := [key for key in keys if key not in self.family.further]:
            lines.append(f"keys of {CONFIG} that change no result, kept for an export: {', '.join(keys)}")
        return lines


def say_widths(kept: int, form: Quantization | None, widened: Mapping[str, int]) -> list[str]:
    """Return lines about the number of tensors that are kept in a form, and of those that are widened to each dtype."""
    lines = [f"{kept} tensors are quantized and are kept as they are stored, as {form}"] if kept else []
    each = [(number, dtype) for dtype, number in widened.items() if number]
    return lines + [f"{n} tensors are quantized and are read as {dtype}, as an export has them" for n, dtype in each]


def write(
    folder: Path,
    model: ModelConfig,
    parameters: Tree,
    dtypes: Mapping[str, str],
    carried: Mapping[str, bytes],
    say: Callable[[str], None],
    mtp_tensors: Mapping[str, StoredTensor | LazyTensor] | None = None,
) -> Family:
    """Write a Hugging Face directory: shards of at most 5 GB, index, config.json, and the files that are carried.

    Args:
      dtypes: the dtype of each tensor by name, and of all other tensors under "".
      carried: contents of further files by name. Of a carried config.json, the keys outside of the architecture stay.
      mtp_tensors: the layers for multi-token prediction, by name, which are written as they are. Without them,
        config.json says that there are none.

    Returns the family. Raises InputError for a model that no family has.
    """
    carried_config = json.loads(carried.get(CONFIG, b"{}"))
    before = dict(text_of(carried_config))
    before.pop(quantized.CONFIG_KEY, None)
    family = named(before["model_type"], CONFIG) if "model_type" in before else family_of(model)
    expected = table.tensors(model, family.rules)
    dtype_of = {name: safetensors.dtype_named(dtypes.get(name, dtypes[""])) for name in expected}
    empty = {
        name: LazyTensor(safetensors.dtype_named(dtypes[""]), shape, lambda shape=shape: np.zeros(shape))
        for name, shape in sparse_layers.empty_tensors(model, family).items()
    }
    further = dict(mtp_tensors or {})
    files = safetensors.shards(table.unwritten(expected, parameters, dtype_of) | empty | further, _SHARD_BYTES)
    if "architectures" in before and model_of(before, CONFIG) == model:
        config = before
    else:
        config = {**before, **config_of(model, family)}
        config |= {key: _torch(dtypes[""]) for key in ("dtype", "torch_dtype")}
    if further:
        say(f"{len(further)} tensors of layers for multi-token prediction are written as they were read")
    elif lost := [key for key in family.further if config.get(key, family.defaults.get(key))]:
        if any(config.get(key) for key in lost):
            say(f"the export has no layers for multi-token prediction, and {CONFIG} had: they are set to 0")
        config |= dict.fromkeys(lost, 0)
    if not before:  # or transformers takes the ids of the family's first model
        ids = json.loads(carried.get(GENERATION, b"{}"))
        config |= {key: ids.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with building(folder) as partial:
        for name, content in carried.items():
            (partial / name).write_bytes(content)
        if config != carried_config:  # or it stays as it is, byte for byte
            write_json(partial / CONFIG, config)
        where = {}
        for number, tensors in enumerate(files, 1):
            name = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            say(f"writing {name}")
            safetensors.write(partial / name, tensors, {"format": "pt"})
            where |= dict.fromkeys(tensors, name)
        if len(files) > 1:
            total = sum(safetensors.total_bytes(tensors.values()) for tensors in files)
            write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return family


def _torch(dtype: str) -> str:
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}.get(dtype, "bfloat16")
