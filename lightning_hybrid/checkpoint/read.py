"""Reader of distributed checkpoints: the rest at once, tensors on request, and only the boxes that are requested.

Only tensors and plain Python values are unpickled, unless the caller trusts the file.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim import Optimizer

from lightning_hybrid.checkpoint import folder
from lightning_hybrid.checkpoint.flat import MODULE, OPTIMIZERS, key_of, put_tensors, torch_state
from lightning_hybrid.checkpoint.local import LocalState
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.params.boxes import ShardBoxes
from lightning_hybrid.step.objects.names import names
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.objects.tensors import dicts_as_subclasses

_OTHER_MODEL = "load it into the model that it was made from"


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """A request to fill a target in place with the tensor of a key, or with a shard of it."""

    key: str
    target: Tensor
    shard: ShardBoxes | None = None


class SavedFolder:
    """A complete distributed checkpoint, open for reading."""

    def __init__(
        self, path: Path, *, weights_only: bool | None = None, digests: bool = True, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Open a folder; ``weights_only`` refuses all but tensors and plain Python values, unless it is False.

        ``digests`` compares files with the manifest, beside reading tensors; ``share`` is this rank and the
        number of ranks, of which each compares some of the files with tensors.

        Raises:
            CheckpointError: It is no checkpoint, or files are missing or were changed.
        """
        self.path = path
        self.manifest = folder.check_complete(path)
        self._weights_only = weights_only is not False
        files = self.manifest["files"] if digests else {}
        self._tensor_files = sorted((name, files[name]) for name in files if name.endswith(".distcp"))
        for name in files.keys() - dict(self._tensor_files).keys():
            folder.check_digest(path, name, files[name])
        rank, count = share
        pool = ThreadPoolExecutor(max_workers=1)
        self._checked = [pool.submit(folder.check_digest, path, *file) for file in self._tensor_files[rank::count]]
        pool.shutdown(wait=False)
        self._reader = FileSystemReader(path)
        self.metadata = _read_index(path / folder.INDEX)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def wait_for_digests(self) -> None:
        """Wait until the files with tensors are compared with their digests; a CheckpointError if one was changed."""
        for checked in self._checked:
            checked.result()

    @property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """The metadata of the saved tensors, such as their full shapes, by key."""
        return {k: t for k, t in self.metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}

    def metadata_of(self, key: str) -> TensorStorageMetadata:
        """The metadata of one tensor, such as its full shape; raises a CheckpointError if there is none of that key."""
        saved = self.metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{self.path} has no {key}; {_OTHER_MODEL}", entry="other-model")
        return saved

    def meta_tensor(self, key: str) -> Tensor:
        """A tensor of one key without content, in its full shape."""
        saved = self.metadata_of(key)
        return torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")

    def rest(self) -> dict[str, Any]:
        """The checkpoint, with references for tensors; a CheckpointError if it has objects of other classes."""
        rest = self._unpickled(folder.META)
        if OPTIMIZERS in rest:
            rest[OPTIMIZERS] = self._unpickled(folder.OPTIMIZERS)
        return rest

    def generators(self) -> list[dict[str, Any]]:
        """The states of each replica's generators; empty if they were not saved."""
        return self._unpickled(folder.GENERATORS) if folder.GENERATORS in self.manifest["files"] else []

    def _unpickled(self, name: str) -> Any:
        try:
            return torch.load(self.path / name, map_location="cpu", weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{self.path / name} holds objects of {named[1] if named else 'a class'}, not only tensors and plain"
                " Python values; if you trust it, pass weights_only=False (--trust on the command line)",
                entry="untrusted",
            ) from error

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill the targets; each file is opened once, and only the boxes that are needed are read."""
        items: list[ReadItem] = []
        targets: dict[str, Tensor] = {}
        for number, each in enumerate(requests):
            saved = self.metadata_of(each.key)
            if each.shard is not None:
                boxes = [(span.offsets, span.sizes, span.of(each.target)) for span in each.shard.spans]
            elif (shape := tuple(each.target.shape)) != tuple(saved.size):
                raise CheckpointError(
                    f"{each.key} has shape {tuple(saved.size)} in {self.path}, not {shape}; {_OTHER_MODEL}",
                    entry="other-model",
                )
            else:
                boxes = [((0,) * len(shape), shape, each.target)]
            for index, (offsets, sizes, target) in enumerate(boxes):
                name = f"{number}.{index}"
                targets[name] = target
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                parts = create_read_items_for_chunk_list(each.key, saved, [chunk])
                items += [_renamed(item, name) for item in parts if 0 not in item.lengths]
        try:
            self._reader.read_data(LoadPlan(items), _Targets(targets)).wait()  # type: ignore[arg-type]
        except Exception:
            for name, entry in self._tensor_files:  # of which other ranks compare some
                folder.check_digest(self.path, name, entry)
            raise

    def checkpoint(self, map_location: Any = None, unread: Collection[str] = ()) -> dict[str, Any]:
        """Read Lightning's checkpoint with full tensors, except the optimizers': those are read when they are needed.

        Tensors are on the CPU unless ``map_location`` names a device. ``unread`` are names in the module's state dict
        that are not read: zeros, without memory until they are accessed.
        """
        rest = self.rest()
        optimizers = rest.get(OPTIMIZERS)
        checkpoint: dict[str, Any] = self.filled({**rest, OPTIMIZERS: None} if OPTIMIZERS in rest else rest, unread)
        if isinstance(map_location, str | torch.device):
            checkpoint = map_leaves(
                lambda leaf: leaf.to(map_location) if isinstance(leaf, Tensor) else leaf, checkpoint
            )
        self.wait_for_digests()
        if optimizers is not None:
            checkpoint[OPTIMIZERS] = [SavedOptimizer(self, state) for state in optimizers]
        return checkpoint

    def filled(self, rest: Any, unread: Collection[str] = ()) -> Any:
        """A subtree of the rest with full tensors in place of references."""
        skipped = {key_of((MODULE, name)) for name in unread}
        requests: dict[str, ReadRequest] = {}

        def target(key: str) -> Tensor:
            if key not in requests:
                saved = self.metadata_of(key)
                make = torch.zeros if key in skipped else torch.empty
                requests[key] = ReadRequest(key, make(saved.size, dtype=saved.properties.dtype))
            return requests[key].target

        tree = put_tensors(rest, target)
        self.read([each for key, each in requests.items() if key not in skipped])
        return tree

    def with_subclasses(self, states: Any) -> Any:
        """States of an optimizer with the tensors of their own classes that were saved as dicts."""
        return dicts_as_subclasses(states, trusts=not self._weights_only)


class SavedOptimizer(Mapping[str, Any]):
    """The state of an optimizer in torch's form; its tensors are read when ``state`` is accessed."""

    def __init__(self, saved: SavedFolder, state: Mapping[str, Any]) -> None:
        self._saved = saved
        self._named = state
        self.path = saved.path

    def __getitem__(self, key: str) -> Any:
        if key != "state":
            return self._torch_state[key]
        return self._saved.with_subclasses(torch_state(self._saved.filled(dict(self._named)))["state"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._torch_state)

    def __len__(self) -> int:
        return len(self._torch_state)

    @property
    def _torch_state(self) -> dict[str, Any]:
        groups = self._saved.filled(self._named["param_groups"])  # a learning rate may be a tensor
        return torch_state({**self._named, "param_groups": groups})

    def entries(self, optimizer: Optimizer, local: LocalState, tensor: Callable[[int, str], Any]) -> dict[int, Any]:
        """The states of an optimizer's parameters by number, with ``tensor(number, key)`` for each saved tensor."""
        saved_names, names = self._named["names"], local.names_of(optimizer)
        if len(names) != len(saved_names):
            raise CheckpointError(
                f"the optimizer has {len(names)} parameters and the one in {self._saved.path} {len(saved_names)};"
                f" the first that differ are {_first_differing(names, saved_names)}",
                entry="other-optimizer",
            )
        of_number = names if self._is_by_name(names) else saved_names
        found = {number: self._named["state"].get(name) for number, name in enumerate(of_number)}
        return {n: put_tensors(entry, partial(tensor, n)) for n, entry in found.items() if entry is not None}

    def _is_by_name(self, names: Sequence[str]) -> bool:
        """False for a module that was renamed since, or a file without names: parameters are matched by order."""
        return set(names) == set(self._named["names"])

    def shapes(self, optimizer: Optimizer, local: LocalState) -> dict[int, Any]:
        """The states of an optimizer's parameters by number, on the meta device: nothing is read."""
        return self.entries(optimizer, local, lambda _, key: self._saved.meta_tensor(key))

    def local_state(self, optimizer: Optimizer, local: LocalState) -> dict[str, Any]:
        """Read the state of this rank's parameters of an optimizer, or shards of them, by number."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        saved_names, names = self._named["names"], local.names_of(optimizer)
        here = {number for number, parameter in enumerate(parameters) if local.has_states_of(parameter)}
        requests: list[ReadRequest] = []

        def target(number: int, key: str) -> Tensor | None:
            if number not in here:
                return None
            saved = self._saved.metadata_of(key)
            shard = local.shard_of_state(names[number], parameters[number], saved.size)
            shape = saved.size if shard is None else shard.shape
            requests.append(ReadRequest(key, torch.empty(shape, dtype=saved.properties.dtype), shard))
            return requests[-1].target

        entries = self.entries(optimizer, local, target)
        states = {number: entry for number, entry in entries.items() if number in here}
        self._saved.read(requests)
        known = set(saved_names)
        others = {key: self._saved.filled(entry) for key, entry in self._named["state"].items() if key not in known}
        groups = [dict(group) for group in self._torch_state["param_groups"]]
        if self._is_by_name(names) and names != saved_names:
            numbered = optimizer.state_dict()["param_groups"]
            groups = [{**saved, "params": group["params"]} for saved, group in zip(groups, numbered, strict=True)]
        return {"state": self._saved.with_subclasses({**states, **others}), "param_groups": groups}


def _first_differing(own_names: Sequence[str], saved_names: Sequence[str]) -> str:
    for a, b in zip(own_names, saved_names, strict=False):
        if a != b:
            return f"{a} and {b}"
    longer = max(own_names, saved_names, key=len)
    return str(longer[min(len(own_names), len(saved_names))])


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _renamed(item: ReadItem, name: str) -> ReadItem:
    """The item with the name of its target as destination."""
    index = torch_metadata.MetadataIndex(name, item.dest_index.offset)
    return ReadItem(item.type, index, item.dest_offsets, item.storage_index, item.storage_offsets, item.lengths)


class _Targets:
    """What torch's reader asks a ``LoadPlanner``: the view of a target that an item fills, of the item's shape."""

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the view."""
        target = self._targets[read_item.dest_index.fqn]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the target, of any shape, was written in place."""


def _read_index(path: Path) -> Metadata:
    """Unpickle torch's index, with only the classes that torch writes there."""
    with path.open("rb") as file:
        metadata = _Index(file, path).load()
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"{path} is not the index of a checkpoint but {type(metadata).__name__}", entry="other-kind"
        )
    return metadata


class _Index(pickle.Unpickler):
    def __init__(self, file: Any, path: str | os.PathLike[str]) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Look up a class by its name, among the classes that torch writes to an index."""
        if module == torch_metadata.__name__ and name in _INDEX_CLASSES:
            return getattr(torch_metadata, name)
        if (module, name) == (torch_files.__name__, "_StorageInfo"):
            return torch_files._StorageInfo
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("builtins", "getattr"):  # by which Python 3.11.0 to 3.11.3 write members of an enum
            return self._member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which is not allowed in the index of a checkpoint",
            entry="index-names",
        )

    def _member(self, owner: Any, name: str) -> Any:
        if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
            raise CheckpointError(
                f"{self._path} names {owner!r}.{name}, which is not allowed in an index", entry="index-names"
            )
        return _MEM_FORMAT_ENCODING[name]


_INDEX_CLASSES = names(
    "Metadata MetadataIndex TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata"
    " StorageMeta _MEM_FORMAT_ENCODING"
)
