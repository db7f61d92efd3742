"""Read a distributed checkpoint: the rest at once, tensors as they are asked for, and of them the boxes asked for.

Nothing is unpickled but tensors and plain Python values, unless the caller trusts the file.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim import Optimizer

from lightning_hybrid.checkpoint import checkpoint_folder as folder
from lightning_hybrid.checkpoint.checkpoint_folder import CheckpointError
from lightning_hybrid.checkpoint.flat_state import MODULE, OPTIMIZERS, key_of, put_tensors, torch_state
from lightning_hybrid.checkpoint.owned_shards import Holdings
from lightning_hybrid.parts.shard_boxes import Part
from lightning_hybrid.step.objects.pytree import map_leaves
from lightning_hybrid.step.standins.absent_tensors import is_absent


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is to be read of a tensor.

    Attributes:
        key: Of the tensor.
        target: Is filled.
        part: What the target is of the whole; all of it if None.
    """

    key: str
    target: Tensor
    part: Part | None = None


class SavedFolder:
    """A distributed checkpoint that is complete."""

    def __init__(self, path: Path, *, weights_only: bool | None = None) -> None:
        """Open it.

        Args:
            path: The folder.
            weights_only: Whether to refuse all but tensors and plain Python values; True if None.

        Raises:
            CheckpointError: It is none, or something is missing.
        """
        self.path = path
        self.manifest = folder.check_complete(path)
        self._weights_only = weights_only is not False
        self._reader = _Reader(path)
        self.metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    @property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """What is saved, by key."""
        return {k: t for k, t in self.metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}

    def rest(self) -> dict[str, Any]:
        """The checkpoint, with references for tensors.

        Raises:
            CheckpointError: It has objects of other classes.
        """
        rest = self._unpickled(folder.META)
        if OPTIMIZERS in rest:
            rest[OPTIMIZERS] = self._unpickled(folder.OPTIMIZERS)
        return rest

    def generators(self) -> list[dict[str, Any]]:
        """The states of each replica's generators; none where they are not known."""
        return self._unpickled(folder.GENERATORS) if folder.GENERATORS in self.manifest["files"] else []

    def _unpickled(self, name: str) -> Any:
        try:
            return torch.load(self.path / name, map_location="cpu", weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{self.path / name} holds objects of {found[1] if found else 'a class'}, not only tensors and plain"
                " Python values; if you trust it, pass weights_only=False (--trust on the command line)"
            ) from error

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill targets; each file is opened once, and only boxes that are needed are read.

        Raises:
            CheckpointError: There is no such tensor, or it has another shape.
        """
        items: list[ReadItem] = []
        targets: dict[str, Tensor] = {}
        for number, each in enumerate(wanted):
            saved = self.tensors.get(each.key)
            if saved is None:
                raise CheckpointError(f"{self.path} has no {each.key}")
            shape = each.target.shape if each.part is None else None
            if shape is not None and shape != saved.size:
                raise CheckpointError(f"{each.key} has shape {tuple(saved.size)} in {self.path}, not {tuple(shape)}")
            spans = [] if each.part is None else each.part.spans
            boxes = [(span.offsets, span.sizes, span.of(each.target)) for span in spans]
            if each.part is None:
                boxes = [((0,) * each.target.dim(), tuple(each.target.shape), each.target)]
            for place, (offsets, sizes, target) in enumerate(boxes):
                name = f"{number}.{place}"
                targets[name] = target
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                found = create_read_items_for_chunk_list(each.key, saved, [chunk])
                items += [_renamed(item, name) for item in found if 0 not in item.lengths]
        self._reader.read_data(LoadPlan(items), _Targets(targets)).wait()

    def tensor(self, key: str) -> Tensor:
        """A whole tensor.

        Raises:
            CheckpointError: There is none.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.path} has no {key}")
        saved = self.tensors[key]
        target = torch.empty(saved.size, dtype=saved.properties.dtype)
        self.read([Wanted(key, target)])
        return target

    def checkpoint(self, map_location: Any = None, unread: Collection[str] = ()) -> dict[str, Any]:
        """Lightning's checkpoint with whole tensors, the optimizers' excepted: those are read when they are needed.

        Args:
            map_location: The device of the tensors; the CPU if it names none.
            unread: Names in the module's state dict that are zero, and take no memory as long as nobody looks.
        """
        rest = self.rest()
        optimizers = rest.get(OPTIMIZERS)
        checkpoint: dict[str, Any] = self.filled({**rest, OPTIMIZERS: None} if OPTIMIZERS in rest else rest, unread)
        if isinstance(map_location, str | torch.device):
            checkpoint = map_leaves(
                lambda leaf: leaf.to(map_location) if isinstance(leaf, Tensor) else leaf, checkpoint
            )
        if optimizers is not None:
            checkpoint[OPTIMIZERS] = [SavedOptimizer(self, state) for state in optimizers]
        return checkpoint

    def filled(self, rest: Any, unread: Collection[str] = ()) -> Any:
        """A part of the rest with whole tensors in place of references."""
        left_out = {key_of((MODULE, name)) for name in unread}
        wanted: dict[str, Wanted] = {}

        def target(key: str) -> Tensor:
            if key not in wanted:
                if key not in self.tensors:
                    raise CheckpointError(f"{self.path} has no {key}")
                saved = self.tensors[key]
                make = torch.zeros if key in left_out else torch.empty
                wanted[key] = Wanted(key, make(saved.size, dtype=saved.properties.dtype))
            return wanted[key].target

        tree = put_tensors(rest, target)
        self.read([each for key, each in wanted.items() if key not in left_out])
        return tree


class SavedOptimizer(Mapping[str, Any]):
    """The state of an optimizer as torch has it; its tensors are read when ``state`` is asked for."""

    def __init__(self, saved: SavedFolder, state: Mapping[str, Any]) -> None:
        """Args: saved: where it is. state: by name, with references."""
        self._saved = saved
        self._named = state

    def __getitem__(self, key: str) -> Any:
        return torch_state(self._saved.filled(dict(self._named)))["state"] if key == "state" else self._known[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def _known(self) -> dict[str, Any]:
        return torch_state(self._named)

    def own(self, optimizer: Optimizer, holdings: Holdings) -> dict[str, Any]:
        """The part of it whose parameters, or parts of them, are on this rank; by number.

        Args:
            optimizer: That is to have it.
            holdings: What this rank holds.

        Raises:
            CheckpointError: It is the state of other parameters.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self._named["names"]
        names = [holdings.name_of(parameter) or f"#{number}" for number, parameter in enumerate(parameters)]
        if len(names) != len(known):
            raise CheckpointError(
                f"the optimizer has {len(names)} parameters and the one in {self._saved.path} {len(known)};"
                f" the first that differ are {_first_differing(names, known)}"
            )
        # Of a module that was renamed since, or of a file that had no names, the places count.
        by_name = set(names) == set(known)
        states: dict[int, Any] = {}
        wanted: list[Wanted] = []
        for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            entry = self._named["state"].get(name if by_name else known[number])
            if entry is not None and not is_absent(parameter):
                states[number] = put_tensors(entry, partial(self._want, wanted, holdings, name, parameter))
        self._saved.read(wanted)
        others = {key: self._saved.filled(entry) for key, entry in self._others()}
        groups = [dict(group) for group in self._named["param_groups"]]
        if by_name and names != known:
            groups = [{**saved, "params": g["params"]} for saved, g in zip(groups, _numbered(optimizer), strict=True)]
        return {"state": {**states, **others}, "param_groups": groups}

    def _others(self) -> list[tuple[Any, Any]]:
        names = set(self._named["names"])
        return [(key, entry) for key, entry in self._named["state"].items() if key not in names]

    def _want(self, wanted: list[Wanted], holdings: Holdings, name: str, parameter: Tensor, key: str) -> Tensor:
        saved = self._saved.tensors.get(key)
        if saved is None:
            raise CheckpointError(f"{self._saved.path} has no {key}")
        part = None
        shape, whole = saved.size, holdings.whole_shape(parameter)
        if holdings.is_cut(parameter) and tuple(saved.size) == whole:
            part = holdings.part(name, whole)
            shape = torch.Size(part.shape)
        wanted.append(Wanted(key, torch.empty(shape, dtype=saved.properties.dtype), part))
        return wanted[-1].target


def _numbered(optimizer: Optimizer) -> list[dict[str, Any]]:
    return list(optimizer.state_dict()["param_groups"])


def _first_differing(mine: Sequence[str], theirs: Sequence[str]) -> str:
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return f"{a} and {b}"
    longer = max(mine, theirs, key=len)
    return str(longer[min(len(mine), len(theirs))])


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _renamed(item: ReadItem, name: str) -> ReadItem:
    """With the name of its target."""
    index = torch_metadata.MetadataIndex(name, item.dest_index.offset)
    return ReadItem(item.type, index, item.dest_offsets, item.storage_index, item.storage_offsets, item.lengths)


class _Targets(LoadPlanner):
    """Tells torch's reader where what it reads belongs."""

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self._targets = targets

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing is left to know."""

    def create_local_plan(self) -> LoadPlan:
        """Made by the caller."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read without each other."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """No bytes are saved."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The place in the target."""
        target = self._targets[read_item.dest_index.fqn]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is there already."""


class _Reader(FileSystemReader):
    """torch's reader; its index is a pickle, of which only what torch writes there is believed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            CheckpointError: It holds something else.
        """
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            metadata = _Index(file, path).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is not the index of a checkpoint but {type(metadata).__name__}")
        return metadata


class _Index(pickle.Unpickler):
    def __init__(self, file: Any, path: str | os.PathLike[str]) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """A class by its name."""
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
        raise CheckpointError(f"{self._path} asks for {module}.{name}, which has no place in the index of a checkpoint")

    def _member(self, owner: Any, name: str) -> Any:
        if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
            raise CheckpointError(f"{self._path} asks for {owner!r}.{name}, which has no place in an index")
        return _MEM_FORMAT_ENCODING[name]


_INDEX_CLASSES = frozenset(
    {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    }
)
