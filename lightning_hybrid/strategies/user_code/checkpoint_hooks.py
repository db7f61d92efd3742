"""Checkpoint hooks of the user, while the module is sharded: tensors that they add are full in the file, or refused.

Their reads are answered as in other hooks. Beyond that, a tensor which they leave in the checkpoint
may be on other ranks, or sharded over several. When Lightning has put the checkpoint together, each of them is replaced
by its full content on the rank that writes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.checkpoint.local import OwnedShards
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.params.reads.hooks import SAVING, HookReads
from lightning_hybrid.patching import around, replaced
from lightning_hybrid.strategies.user_code.hooks import is_of_user
from lightning_hybrid.strategies.user_code.watched import HookWatch

_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple)
_PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, OwnedShards)
# Keys of what `save_hyperparameters` has recorded of the module and of the data module.
_HYPER_PARAMETERS = (("hyper_parameters",), ("datamodule_hyper_parameters",))
_ADVICE = (
    "add tensors that the hook computes from parameters (p.detach().clone()), or numbers, in dicts, lists and tuples,"
    " and the same on every rank"
)


class CheckpointHooks:
    """Runs the hooks of one trainer that add to its checkpoints, and replaces what they added by full tensors."""

    def __init__(self, watch: HookWatch, reads: HookReads) -> None:
        self._watch, self._reads = watch, reads
        self._trainer: Any = watch.trainer
        self._added: dict[int, tuple[Any, str]] | None = None  # by id: it, and the hook; None while nothing is saved

    def wrap(self) -> Callable[[], None]:
        """Wrap the hooks that the user wrote, and what puts a checkpoint together; return the undo."""
        trainer, undo = self._trainer, contextlib.ExitStack()
        owners = [(trainer.lightning_module, "on_save_checkpoint")]
        owners += [(callback, name) for callback in trainer.callbacks for name in ("state_dict", "on_save_checkpoint")]
        if trainer.datamodule is not None:
            owners.append((trainer.datamodule, "state_dict"))
        why = "hooks save full values"
        for user, name in owners:
            if is_of_user(getattr(user, name)):
                undo.enter_context(replaced(user, name, self._wrapped_hook(user, name), reason=why))
        undo.callback(around(trainer._checkpoint_connector, "dump_checkpoint", self._dump, reason=why))
        return undo.close

    def _wrapped_hook(self, user: Any, name: str) -> Callable[..., Any]:
        """Wrap a hook to record the leaves that it adds."""
        original, where = getattr(user, name), f"{type(user).__name__}.{name}"
        watched = self._watch.watched(user, name, original)

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            if self._added is None:
                return original(*args, **kwargs)
            if self._is_disconnected:  # nothing will be written, and the ranks that would take part are gone
                return {}
            is_state = where.endswith(".state_dict")
            checkpoint = None if is_state else args[-1] if args else kwargs["checkpoint"]
            before = {id(leaf) for _, leaf in _leaves(checkpoint)}
            with torch._C._EnableTorchFunction():  # who saves in another hook reads there too
                result = watched(*args, **kwargs)
            for _, leaf in _leaves(result if is_state else checkpoint):
                if id(leaf) not in before and not isinstance(leaf, _PLAIN):
                    self._added.setdefault(id(leaf), (leaf, where))
            return result

        return hook

    def _dump(self, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call Lightning's ``dump_checkpoint``; return leaves that hooks add as full tensors."""
        if not self._watch.is_sharded or self._added is not None:
            return original(*args, **kwargs)
        self._added = {}
        states = [optimizer.state for optimizer in self._trainer.strategy.optimizers]
        try:
            with self._reads.tracking(states, self._watch.copies):
                checkpoint = original(*args, **kwargs)
                if self._is_disconnected:
                    return checkpoint
                with self._reads.hook(SAVING), torch._C.DisableTorchFunction():
                    return self._full_checkpoint(checkpoint, self._added)
        finally:
            self._added = None

    @property
    def _is_disconnected(self) -> bool:
        strategy: Any = self._trainer.strategy
        return bool(strategy.world.is_disconnected)

    def _full_checkpoint(self, checkpoint: dict[str, Any], added: dict[int, tuple[Any, str]]) -> dict[str, Any]:
        """Return the checkpoint with full tensors, on the rank that writes; collective over the ranks of a copy.

        Raises:
            CheckpointError: A content cannot be had, or some ranks add what others do not; on every rank of the copy.
        """
        tensors: dict[int, Tensor] = {}
        objects: dict[int, Any] = {}
        here: dict[int, Any] = {}
        named: list[str] = []
        refused: list[str] = []
        for path, leaf in _leaves(checkpoint):
            is_hyper_parameter = path[:1] in _HYPER_PARAMETERS and not isinstance(leaf, _PLAIN)
            if id(leaf) not in added and not is_hyper_parameter:
                continue
            adds = added[id(leaf)][1] if id(leaf) in added else "save_hyperparameters"
            name = f"checkpoint{''.join(f'[{key!r}]' for key in path)}, which {adds} adds,"
            if not isinstance(leaf, Tensor):
                if id(leaf) not in objects and _holds_tensors(leaf):
                    objects[id(leaf)] = leaf
                    named.append(name)
                continue
            is_on_all_ranks = self._reads.is_on_all_ranks(leaf)
            if is_on_all_ranks is None:
                refused.append(
                    f"{name} is a tensor of shape {tuple(leaf.shape)} of which rank {self._trainer.global_rank} has no"
                    " content or only a shard, and which was made outside of hooks"
                )
            elif is_on_all_ranks:
                here[id(leaf)] = _plain_tensor(leaf, leaf)
            elif id(leaf) not in tensors:
                tensors[id(leaf)] = leaf
                named.append(name)
        gathered = self._reads.gather_objects((refused, named))
        if problems := [each for others, _ in gathered for each in others]:
            raise CheckpointError(f"{problems[0]}; {_ADVICE}", entry="save-hook")
        names = [each for _, each in gathered]
        if lone := [name for each in names for name in each if any(name not in others for others in names)]:
            raise CheckpointError(
                f"{lone[0]} is added by some ranks, or is sharded over some, only; {_ADVICE}", entry="save-hook"
            )
        writes = bool(self._trainer.strategy.is_global_zero)
        full_tensors = self._reads.contents_for_file(list(tensors.values()), keep=writes)
        for (key, leaf), full_tensor in zip(tensors.items(), full_tensors, strict=True):
            here[key] = _plain_tensor(leaf, full_tensor)
        if objects:
            with torch._C._EnableTorchFunction():  # pickles are of full contents there
                here.update(zip(objects, _copies(list(objects.values()), keep=writes), strict=True))
        return _rebuilt(checkpoint, here)


def _plain_tensor(leaf: Tensor, content: Tensor) -> Tensor:
    """Return the content as a tensor of the user's kind, without a run's attributes, which would be pickled."""
    if content is leaf and not any(name.startswith("_hybrid") for name in leaf.__dict__):
        return leaf
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(content.detach(), requires_grad=leaf.requires_grad)
    return content.detach().requires_grad_(leaf.requires_grad)


def _leaves(
    value: Any, path: tuple[Any, ...] = (), around: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of builtin containers, with their paths."""
    if type(value) not in _CONTAINERS or id(value) in around:
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        yield from _leaves(child, (*path, key), (*around, id(value)))


def _rebuilt(value: Any, contents: dict[int, Any], around: tuple[int, ...] = ()) -> Any:
    """Rebuild containers with other tensors; containers without any stay the user's own objects."""
    if type(value) not in _CONTAINERS or id(value) in around:
        return contents.get(id(value), value)
    around = (*around, id(value))
    if isinstance(value, dict):
        built = {key: _rebuilt(child, contents, around) for key, child in value.items()}
        if all(built[key] is child for key, child in value.items()):
            return value
        result = copy.copy(value)
        result.update(built)
        return result
    children = [_rebuilt(child, contents, around) for child in value]
    if all(new is old for new, old in zip(children, value, strict=True)):
        return value
    return type(value)(children)


class _TensorFinder(pickle.Pickler):
    """Pickles an object as the file would, and finds out whether it has modules or tensors."""

    has_found = False

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor | nn.Module):
            self.has_found = True
            return True
        return None


def _holds_tensors(value: Any) -> bool:
    """Whether an object would bring modules or tensors into the file, as far as it can be pickled at all."""
    finder = _TensorFinder(io.BytesIO())
    with contextlib.suppress(Exception):  # whoever writes the file says what cannot be pickled
        finder.dump(value)
    return finder.has_found


def _copies(values: list[Any], *, keep: bool) -> list[Any]:
    """Copy objects as the file has them; a rank that does not keep them only joins the collectives."""
    if keep:
        copies: list[Any] = pickle.loads(pickle.dumps(values))
        return copies
    pickle.Pickler(_NullFile()).dump(values)
    return values


class _NullFile:
    """A file that discards its content."""

    def write(self, data: Any) -> int:
        return len(data)
