"""The folder of a distributed checkpoint, which appears under its name only when it is complete.

    model.ckpt/
      manifest.json       layout, versions, step, and every file with its size and digest; written last
      meta.pt             all but tensors of the model or optimizers: loops, callbacks, schedulers, hyper-parameters
      optimizers.pt       the optimizers' groups, names and scalars
      generators.pt       the states of each replica's generators
      .metadata           torch.distributed.checkpoint's index: the file and offset of each box of each tensor
      __0_0.distcp ...    one file of each rank
      README.txt          what the folder is, and how to make one ordinary file of it

A save writes to ``model.ckpt.incomplete``, which is renamed when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning_hybrid.errors import CheckpointError, IncompleteCheckpoint

MANIFEST, META, OPTIMIZERS, GENERATORS = "manifest.json", "meta.pt", "optimizers.pt", "generators.pt"
INDEX = ".metadata"
_README = """A distributed checkpoint of lightning_hybrid.
Resume from it under any layout: trainer.fit(module, ckpt_path=FOLDER)
For one ordinary file of Lightning run: lightning-hybrid checkpoint convert FOLDER FILE.ckpt
"""
FORMAT, VERSION = "lightning_hybrid checkpoint", 1
INCOMPLETE = ".incomplete"
_LISTED = 5
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def incomplete_path(path: Path) -> Path:
    """The path of a checkpoint while it is written."""
    return path.with_name(path.name + INCOMPLETE)


def is_folder(path: Any) -> bool:
    """Whether a path is a local folder, complete or not, or one that a save has not finished."""
    if not isinstance(path, str | os.PathLike) or "://" in str(path):
        return False
    local = Path(path)
    return local.is_dir() or (not local.exists() and incomplete_path(local).is_dir())


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of this kind, complete or not."""
    return (path / MANIFEST).is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in a folder.

    Raises:
        IncompleteCheckpoint: It has none, or its save did not end.
        CheckpointError: It is a folder of something else, or of a later version, or it was changed.
    """
    if not (path / MANIFEST).is_file():
        raise _no_checkpoint(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise IncompleteCheckpoint(
            f"{path / MANIFEST} is not valid JSON ({error}); use another checkpoint", entry="files-missing"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / MANIFEST} is not the manifest of a checkpoint of lightning_hybrid", entry="other-kind"
        )
    if "sha256" in manifest and manifest["sha256"] != _digest(manifest):
        raise CheckpointError(
            f"{path / MANIFEST} has other content than when it was written (its SHA-256 is not that in it); use another"
            " checkpoint, or remove the entry sha256 from it to read it all the same",
            entry="digest",
        )
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has version {manifest['version']} and this lightning_hybrid reads up to {VERSION}; it was written"
            f" by lightning_hybrid {manifest['versions'].get('lightning_hybrid')}: install that or a later one",
            entry="later-version",
        )
    return manifest


def _no_checkpoint(path: Path) -> CheckpointError:
    """The error for a folder without a manifest."""
    if incomplete_path(path).is_dir() and not (path.is_dir() and any(path.iterdir())):
        return IncompleteCheckpoint(
            f"{path} is not there: a save to it began and did not end{_alternatives(path)}", entry="save-not-ended"
        )
    names = {entry.name for entry in path.iterdir()}
    if not names:
        return IncompleteCheckpoint(
            f"{path} is empty: a save to it began and did not end{_alternatives(path)}", entry="save-not-ended"
        )
    if any(name.startswith("__") and name.endswith(".distcp") for name in names) and INDEX not in names:
        return IncompleteCheckpoint(
            f"{path} has no {MANIFEST}: its save did not end{_alternatives(path)}", entry="save-not-ended"
        )
    if {META, OPTIMIZERS, INDEX} <= names:
        return IncompleteCheckpoint(
            f"{path} has no {MANIFEST}, which names the files of a checkpoint of lightning_hybrid and their digests;"
            f" the other files are there: it was lost, or a removal did not end{_alternatives(path)}",
            entry="files-missing",
        )
    listed = ", ".join(sorted(names)[:_LISTED])
    return CheckpointError(
        f"{path} is no checkpoint of lightning_hybrid: it has no {MANIFEST} but {listed}{_kind(names)}",
        entry="other-kind",
    )


def _kind(names: Collection[str]) -> str:
    """What wrote a folder of these files, and how they are loaded; "" if it is not known."""
    if {META, INDEX} <= set(names):
        return (
            "; it is a sharded checkpoint of Lightning's own strategies, and `python -m lightning.fabric.utilities."
            "consolidate_checkpoint` makes one file of it, which can be loaded"
        )
    if INDEX in names:
        return "; it was written by torch.distributed.checkpoint, without Lightning's part"
    if "zero_to_fp32.py" in names:
        return (
            "; it is a checkpoint of DeepSpeed: run `python zero_to_fp32.py . weights.pt` in it, and load weights.pt"
            " by load_state_dict, without ckpt_path"
        )
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return "; it is a model saved by save_pretrained: load it by from_pretrained in __init__, without ckpt_path"
    return ""


def _alternatives(path: Path) -> str:
    """The end of an error message: complete checkpoints beside ``path`` to resume from."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    complete = sorted(p.name for p in beside if p.is_dir() and p != path and is_checkpoint(p) and not missing(p))
    if complete:
        return f"; set ckpt_path to one of the complete ones beside it: {', '.join(complete[:_LISTED])}"
    return "; there is no complete one beside it: set another ckpt_path, or none to begin anew"


def missing(path: Path) -> list[str]:
    """List the files of the manifest that are missing or of another size, one sentence each; contents are not read."""
    problems = []
    for name, entry in read_manifest(path)["files"].items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            problems.append(
                f"{name} is missing" if size is None else f"{name} has {size} bytes instead of {entry['bytes']}"
            )
    return problems


def check_complete(path: Path) -> dict[str, Any]:
    """Check that every file of a checkpoint exists with its size, or raise; return the manifest."""
    manifest = read_manifest(path)
    if lacking := missing(path):
        raise IncompleteCheckpoint(
            f"{path} is incomplete: {', '.join(lacking[:_LISTED])} ({len(lacking)} of {len(manifest['files'])} files)"
            f"{_alternatives(path)}",
            entry="files-missing",
        )
    return manifest


class DigestedFile:
    """A new file, open for writing, which is on the disk when it is closed; ``entry`` describes it in the manifest."""

    def __init__(self, path: Path) -> None:
        self._file, self._digest = path.open("wb"), hashlib.sha256()
        self.size = 0

    def write(self, content: Any) -> int:
        """Append bytes, or anything that has a buffer."""
        num_bytes = memoryview(content).nbytes
        self._file.write(content)
        self._digest.update(content)
        self.size += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Do nothing: closing flushes."""

    @property
    def entry(self) -> dict[str, Any]:
        """Size and digest."""
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> DigestedFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a file to the disk and describe it as the manifest does."""
    with DigestedFile(path) as file:
        file.write(content)
    return file.entry


def digest(path: Path) -> str:
    """The SHA-256 of a file, read piece by piece."""
    with path.open("rb") as file:
        computed = hashlib.sha256()
        while piece := file.read(1 << 20):
            computed.update(piece)
    return computed.hexdigest()


def check_digest(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Check that a file of a checkpoint has the content that was written, or raise a CheckpointError."""
    if digest(path / name) != entry["sha256"]:
        raise CheckpointError(
            f"{path / name} has other content than when it was written (its SHA-256 is not that of {MANIFEST}); load"
            " another checkpoint. A strategy with check_digests=False loads it all the same",
            entry="digest",
        )


def finish(path: Path, manifest: Mapping[str, Any]) -> None:
    """Complete the folder at ``incomplete_path(path)``: write its manifest, then rename it.

    A checkpoint at ``path`` is replaced atomically where the system can.

    Raises:
        CheckpointError: A file that it lists is not there: ranks do not share the filesystem.
    """
    folder = incomplete_path(path)
    for name, entry in manifest["files"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{folder / name} was written by another rank and is not seen by the first one; save to a folder on a"
                " filesystem that all ranks share",
                entry="save-filesystem",
            )
    for entry in folder.iterdir():  # of an earlier save that did not end
        if entry.name not in manifest["files"]:
            entry.unlink()
    write_file(folder / "README.txt", _README.encode())
    content = {"format": FORMAT, "version": VERSION, **manifest}
    write_file(folder / MANIFEST, json.dumps({**content, "sha256": _digest(content)}, indent=1).encode())
    _sync(folder)
    _publish(folder, path)
    _sync(path.parent)


def _digest(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest but for the entry that has it."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _publish(folder: Path, path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        os.rename(folder, path)  # takes the place of an empty folder too
    elif _exchange(folder, path):
        remove(folder)
    else:
        aside = path.with_name(path.name + ".replaced")
        remove(aside)
        os.rename(path, aside)
        os.rename(folder, path)
        remove(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths atomically, where the system can."""
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
    return False


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every filesystem can
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove(path: Path) -> None:
    """Remove a file or folder; the manifest of a checkpoint first, so that a partial removal is recognized."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
