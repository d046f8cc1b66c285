"""Copies of a run's state in the memory of its hosts, which outlive its processes.

Each part of each array is kept on two hosts: where the mesh does not have it on two, a permutation sends it to the next
host. The parts of one host lie in a file system in memory, those of two steps at a time.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import secrets
import shutil
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.errors import InputError
from jaxlm.core.files import replace
from jaxlm.models.tree import Tree, paths
from jaxlm.parallel.host_shards import HostShards
from jaxlm.parallel.processes import barrier, broadcast_from_first, gather, is_first, process_index
from jaxlm.training.checkpoints import Unsaved
from jaxlm.training.paths import RunPaths

# Copies that are kept: while the newest is written, the one before it is whole.
_KEPT = 2
_HOST, _MANIFESTS = "jaxlm-host", "*.json"


class StateBlock(NamedTuple):
    """A part of the array at a path of the state: from `begin` up to `end`, in each dimension."""

    path: str
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the part."""
        return tuple(last - first for first, last in zip(self.begin, self.end, strict=True))

    @staticmethod
    def of(row: list) -> "StateBlock":
        """Return the block that a line of JSON describes."""
        return StateBlock(row[0], tuple(row[1]), tuple(row[2]))


class SavedBlock(NamedTuple):
    """The place of a block in a file, and the checksum of its bytes."""

    file: Path
    offset: int
    digest: str


def holders(path: str, shape: tuple[int, ...], sharding: NamedSharding) -> dict[StateBlock, list[Any]]:
    """Return the blocks that an array is divided into, each with the devices that hold it."""
    blocks: dict[StateBlock, list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        block = StateBlock(path, tuple(first for first, _ in bounds), tuple(last for _, last in bounds))
        blocks.setdefault(block, []).append(device)
    return {block: sorted(devices, key=_order) for block, devices in blocks.items()}


def _order(device: Any) -> tuple[int, int]:
    return device.process_index, device.id


def sends(
    blocks: Mapping[StateBlock, list[Any]], host_of: Callable[[Any], str], mesh: Mesh
) -> list[dict[StateBlock, tuple[Any, Any]]]:
    """Return, for the blocks of one array that a single host holds, the device that sends each and the device of the
    next host that receives it, in rounds in which a device receives once; nothing where there is one host."""
    devices = sorted(mesh.devices.flat, key=_order)
    hosts = [*dict.fromkeys(map(host_of, devices))]
    waiting = {block: devices[0] for block, devices in blocks.items() if len(set(map(host_of, devices))) == 1}
    rounds = []
    while waiting and len(hosts) > 1:
        free = {host: [device for device in devices if host_of(device) == host] for host in hosts}
        sent = {}
        for block, source in waiting.items():
            if receivers := free[hosts[(hosts.index(host_of(source)) + 1) % len(hosts)]]:
                sent[block] = source, receivers.pop(0)
        waiting = {block: source for block, source in waiting.items() if block not in sent}
        rounds.append(sent)
    return rounds


@functools.cache
def _permutation(mesh: Mesh, spec: PartitionSpec, pairs: tuple[tuple[int, int], ...]) -> Any:
    """Return a jitted function that moves shards of an array between devices, by their numbers in the mesh."""

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, mesh.axis_names, pairs)

    return jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def sent(array: jax.Array, spec: PartitionSpec, mesh: Mesh, pairs: Mapping[StateBlock, tuple[Any, Any]]) -> jax.Array:
    """Return an array whose shards, on the devices that receive, are those of the devices that send. All processes call
    it."""
    number = {device: i for i, device in enumerate(mesh.devices.flat)}
    return _permutation(mesh, spec, tuple((number[source], number[to]) for source, to in pairs.values()))(array)


class MemoryCopies:
    """The copies of one run's state, one at a time by step. In a job of several processes all make each call.

    Args:
      folder: of a file system in memory, the same for the processes of one host and no others.
      run: the paths of the run, whose folder all processes share; it has the name of the copies.
      like: `jax.ShapeDtypeStruct`s of the state with shardings on `mesh`.

    Raises InputError where the folder cannot hold two copies of this host's part of the state.
    """

    def __init__(self, folder: Path, run: RunPaths, like: Tree, mesh: Mesh):
        self._folder, self._run, self._mesh = folder, run, mesh
        self._like = paths(like)
        self._structure = jax.tree.structure(like)
        try:
            self._hosts = gather(_host_name(folder))  # of each process
        except OSError as error:
            raise InputError(
                f"checkpoint.memory_folder = {folder} cannot be written to ({error.strerror}); choose a folder of a "
                "file system in memory, or unset checkpoint.memory_every"
            ) from None
        self._host = self._hosts[process_index()]
        self._beside = [i for i, host in enumerate(self._hosts) if host == self._host]
        self._leads = self._beside[0] == process_index()  # removes what this host keeps no longer
        self._kept: list[Path] = []
        self._offers: dict[str, dict[StateBlock, list[str]]] = {}
        self._plan()

    def _plan(self) -> None:
        """Decide which blocks this process writes, and which are sent."""
        # Of each path: the block, the round that sends it here if any, and the device it is on.
        self._written: dict[str, list[tuple[StateBlock, int | None, Any]]] = {}
        self._rounds: dict[str, list[dict[StateBlock, tuple[Any, Any]]]] = {}
        bytes_here = 0
        for path, leaf in self._like.items():
            blocks = holders(path, leaf.shape, leaf.sharding)
            self._rounds[path] = sends(blocks, self._host_of, self._mesh)
            first = {(block, self._host_of(d)): d for block, devices in blocks.items() for d in reversed(devices)}
            writers = [(block, None, device) for (block, _), device in first.items()]
            for number, pairs in enumerate(self._rounds[path]):
                writers += [(block, number, receiver) for block, (_, receiver) in pairs.items()]
            for block, number, device in writers:
                bytes_here += self._bytes_of(block) if self._host_of(device) == self._host else 0
                if device.process_index == process_index():
                    self._written.setdefault(path, []).append((block, number, device))
        free = shutil.disk_usage(self._folder).free
        if free < _KEPT * bytes_here:
            raise InputError(
                f"{_KEPT} copies of this host's part of the state take {_KEPT * bytes_here / 1e9:.3g} GB, and "
                f"checkpoint.memory_folder = {self._folder} has {free / 1e9:.3g} GB free; give it more memory, or "
                "unset checkpoint.memory_every"
            )

    def _host_of(self, device: Any) -> str:
        return self._hosts[device.process_index]

    def _bytes_of(self, block: StateBlock) -> int:
        return math.prod(block.shape) * self._like[block.path].dtype.itemsize

    def find(self, after: int) -> int | None:
        """Return the newest step after `after` of which the hosts together have a whole copy; without one None, and
        what there is of copies counts no longer."""
        known = broadcast_from_first(_read_name(self._run) if is_first() else 0)
        offers = self._verified(self._folder / f"jaxlm-{known:x}", after) if known and self._leads else {}
        described = {name: list(blocks) for name, blocks in offers.items()}
        self._offers = {}
        for host, offered in zip(self._hosts, map(json.loads, gather(json.dumps(described))), strict=True):
            for name, rows in offered.items():
                for row in rows:
                    self._offers.setdefault(name, {}).setdefault(StateBlock.of(row), []).append(host)
        whole = [name for name, blocks in self._offers.items() if self._is_whole(blocks)]
        self._found = max(whole, key=lambda name: (_step_of(name), name), default=None)
        number = known if self._found is not None else broadcast_from_first(secrets.randbits(48))
        self._root = self._folder / f"jaxlm-{number:x}"
        if number != known:
            if is_first():
                self._run.memory_name.parent.mkdir(parents=True, exist_ok=True)
                replace(self._run.memory_name, f"{number:x}\n")
            if known and self._leads:
                shutil.rmtree(self._folder / f"jaxlm-{known:x}", ignore_errors=True)
        self._start = broadcast_from_first(secrets.randbits(48))
        return None if self._found is None else _step_of(self._found)

    def _verified(self, root: Path, after: int) -> dict[str, dict[StateBlock, SavedBlock]]:
        """Return the blocks of each copy on this host whose bytes match their checksums."""
        if not root.is_dir() or root.stat().st_uid != os.getuid():
            return {}
        copies = {}
        with ThreadPoolExecutor() as pool:
            for folder in root.iterdir():
                if _step_of(folder.name) > after:
                    blocks = _stored(folder)
                    right = pool.map(self._matches, blocks.items())
                    copies[folder.name] = dict(itertools.compress(blocks.items(), right))
        return copies

    def _matches(self, named: tuple[StateBlock, SavedBlock]) -> bool:
        block, stored = named
        return block.path in self._like and _digest(self._bytes(block, stored)) == stored.digest

    def _bytes(self, block: StateBlock, stored: SavedBlock) -> np.ndarray:
        """Return the bytes of a block, which are read as they are used."""
        size = self._bytes_of(block)
        if not size or stored.file.stat().st_size < stored.offset + size:
            return np.empty(0, np.uint8)
        return np.memmap(stored.file, np.uint8, "r", stored.offset, (size,))

    def _is_whole(self, blocks: Mapping[StateBlock, Any]) -> bool:
        """Return whether blocks, which are those of one sharding, are all of the state's arrays."""
        sizes = dict.fromkeys(self._like, 0)
        for block in blocks:
            if len(block.end) != len(self._like[block.path].shape):
                return False
            sizes[block.path] += math.prod(block.shape)
        ends = all(last <= size for b in blocks for last, size in zip(b.end, self._like[b.path].shape, strict=True))
        return ends and all(sizes[path] == math.prod(leaf.shape) for path, leaf in self._like.items())

    def restore(self) -> Tree:
        """Return the state of the step that was found. What a host lacks of it passes through the folder of the run."""
        assert self._found is not None
        newest, blocks = self._root / self._found, self._offers[self._found]
        here, exchange = _stored(newest), self._run.elastic / "blocks"
        hosts = sorted(set(self._hosts))
        missing = {block: i for i, block in enumerate(sorted(blocks)) if len(blocks[block]) < len(hosts)}
        if missing:
            exchange.mkdir(parents=True, exist_ok=True)
        rank = self._beside.index(process_index())
        for block, i in missing.items():
            if blocks[block][0] == self._host and i % len(self._beside) == rank:
                self._bytes(block, here[block]).tofile(exchange / str(i))
        barrier("blocks of copies are written")
        arrays = {path: HostShards(leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in self._like.items()}
        for block, offered in blocks.items():
            kept = here[block] if self._host in offered else SavedBlock(exchange / str(missing[block]), 0, "")
            leaf = self._like[block.path]
            piece = self._bytes(block, kept).view(leaf.dtype).reshape(block.shape)
            arrays[block.path].fill(block.begin, piece)
        restored = [array.on_devices() for array in arrays.values()]
        barrier("blocks of copies are read")
        if is_first():
            shutil.rmtree(exchange, ignore_errors=True)
        self._keep_only(newest)
        return jax.tree.unflatten(self._structure, restored)

    def _keep_only(self, newest: Path) -> None:
        self._kept = [newest]
        for other in self._root.iterdir() if self._leads and self._root.is_dir() else ():
            if other != newest:
                shutil.rmtree(other, ignore_errors=True)

    def save(self, step: int, state: Tree) -> None:
        """Copy the state, and return once this process's part is whole. Raises Unsaved."""
        folder = self._root / f"{step}-{self._start:x}"
        if len(self._kept) == _KEPT and (old := self._kept.pop(0)) and self._leads:
            shutil.rmtree(old, ignore_errors=True)  # every process has the one after it: they trained steps since
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(exist_ok=True)
            self._write(folder, paths(state))
        except OSError as error:
            raise Unsaved(
                f"cannot keep a copy of the state in {self._folder} ({error.strerror}); give it more memory, or unset "
                "checkpoint.memory_every"
            ) from error
        self._kept.append(folder)

    def _write(self, folder: Path, arrays: dict[str, jax.Array]) -> None:
        file, rows, offset = folder / f"{process_index()}.bin", [], 0
        with file.open("wb", buffering=0) as target, ThreadPoolExecutor() as pool:
            for path, array in arrays.items():
                spec = self._like[path].sharding.spec
                versions: dict[int | None, jax.Array] = {None: array}
                for number, pairs in enumerate(self._rounds[path]):
                    versions[number] = sent(array, spec, self._mesh, pairs)
                shards = {(n, shard.device): shard.data for n, x in versions.items() for shard in x.addressable_shards}
                for block, number, device in self._written.get(path, ()):
                    digest = pool.submit(_write_at, target.fileno(), offset, shards[number, device])
                    rows.append((block, offset, digest))
                    offset += self._bytes_of(block)
            listed = [[*block, start, digest.result()] for block, start, digest in rows]
        replace(file.with_suffix(".json"), json.dumps(listed))

    def clear(self) -> None:
        """Remove all copies: a checkpoint of the last step is written."""
        barrier("copies are needed no longer")
        if self._leads:
            shutil.rmtree(self._root, ignore_errors=True)


def forget(run: RunPaths) -> None:
    """Let no copy of earlier starts count: this one makes none, and may train the steps after them anew."""
    if is_first():
        run.memory_name.unlink(missing_ok=True)


def _host_name(folder: Path) -> str:
    """Return a name that processes with the same folder share, and others do not."""
    file, own = folder / _HOST, folder / f".{_HOST}-{uuid.uuid4().hex}"
    if not file.exists():
        own.write_text(uuid.uuid4().hex)
        try:
            os.link(own, file)
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return file.read_text()


def _read_name(run: RunPaths) -> int:
    try:
        return int(run.memory_name.read_text(), 16)
    except (OSError, ValueError):
        return 0


def _step_of(name: str) -> int:
    step = name.partition("-")[0]
    return int(step) if step.isdecimal() else -1


def _stored(folder: Path) -> dict[StateBlock, SavedBlock]:
    """Return the blocks of a copy that processes of this host wrote to their end."""
    blocks = {}
    for manifest in folder.glob(_MANIFESTS):
        for path, begin, end, offset, digest in json.loads(manifest.read_text()):
            blocks[StateBlock.of([path, begin, end])] = SavedBlock(manifest.with_suffix(".bin"), offset, digest)
    return blocks


def _write_at(descriptor: int, offset: int, data: jax.Array) -> str:
    """Write the numbers of an array on one device into a file; return their checksum."""
    content = np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)
    written = 0
    while written < content.size:  # the system writes less than 2^31 bytes at once
        written += os.pwrite(descriptor, content.data[written:], offset + written)
    return _digest(content)


def _digest(content: np.ndarray) -> str:
    return hashlib.blake2b(content.data, digest_size=32).hexdigest()
