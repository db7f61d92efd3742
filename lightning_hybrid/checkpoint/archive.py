"""The file of a checkpoint that torch writes, an archive: whether it is whole, found without reading its tensors."""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lightning_hybrid.errors import CheckpointError, IncompleteCheckpoint

_LISTED = 5
_ARCHIVE, _PICKLE, _TAR = b"PK\x03\x04", b"\x80", b"ustar"  # how files begin; files of torch before 1.6 are pickles
_TAR_AT = 257
_LENGTHS_AT = 26  # in the header of a member: of its name, and of what follows it
_CONTENT = "data.pkl"
_NOT_ENDED = "did not end"


def is_readable(path: str | os.PathLike[str]) -> bool:
    """Whether a local file can be the checkpoint of a Trainer."""
    return not _problem(Path(path))


def check_archive(path: str | os.PathLike[str]) -> None:
    """Check that a local file can be the checkpoint of a Trainer; its end and its small part are read.

    Raises:
        IncompleteCheckpoint: It is empty or truncated.
        CheckpointError: It is damaged, or something else.
    """
    file = Path(path)
    if not (problem := _problem(file)):
        return
    kind = IncompleteCheckpoint if problem.endswith(_NOT_ENDED) else CheckpointError
    size = f"{file.stat().st_size:,}"
    raise kind(f"{file} ({size} bytes) cannot be read: {problem}{_alternatives(file)}", entry="file-damaged")


def _problem(file: Path) -> str:
    """What is wrong with a file; "" if nothing was found."""
    if not file.stat().st_size:
        return f"it is empty: its save {_NOT_ENDED}"
    with file.open("rb") as opened:
        start = opened.read(_TAR_AT + len(_TAR))
    if not start.startswith(_ARCHIVE):
        is_older = start.startswith(_PICKLE) or start[_TAR_AT:] == _TAR
        return "" if is_older else f"it is no file of torch.save: it begins with {start[:8]!r}"
    if not zipfile.is_zipfile(file):
        return f"it is truncated, without the directory at its end: a save or copy {_NOT_ENDED}"
    try:
        with zipfile.ZipFile(file) as archive:
            name = next((name for name in archive.namelist() if name.endswith(f"/{_CONTENT}")), "")
            return _problem_of(archive, name) if name else f"its archive has no {_CONTENT}"
    except zipfile.BadZipFile as error:
        return f"its archive is damaged ({error})"


def _problem_of(archive: zipfile.ZipFile, name: str) -> str:
    """What is wrong with a pickle in an archive; nothing is unpickled."""
    try:
        archive.read(name)
    except zipfile.BadZipFile as error:  # a checksum, which torch need not write
        try:
            for _ in pickletools.genops(_stored(archive, name)):
                pass
        except Exception:
            return f"it was changed after it was written ({error})"
    return ""


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a member that is not compressed, whatever its checksum."""
    info = archive.getinfo(name)
    with open(str(archive.filename), "rb") as file:
        file.seek(info.header_offset + _LENGTHS_AT)
        file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
        return file.read(info.file_size)


def _alternatives(file: Path) -> str:
    """The end of an error message: files beside this one to resume from, the latest last."""
    found = sorted((each for each in file.parent.glob("*.ckpt") if each != file), key=lambda each: each.stat().st_mtime)
    readable = [each.name for each in _readable(reversed(found))]
    if not readable:
        return f"; {file.parent} has no other checkpoint: set another ckpt_path, or none to begin anew"
    return f"; set ckpt_path to one of those beside it: {', '.join(readable[::-1])}"


def _readable(files: Iterator[Path]) -> Iterator[Path]:
    """The first few of these that are whole."""
    whole = (each for each in files if each.is_file() and not _problem(each))
    for _, each in zip(range(_LISTED), whole, strict=False):
        yield each
