"""Files that appear as a whole or not at all: written into a hidden folder beside their places, and moved at the end.

What a killed process leaves is recognised by its lock, which dies with the process, and removed by the next one that
writes into the same folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

PREFIX, SUFFIX = ".onnxfuse-", ".tmp"
LOCK = "lock"
UNLOCKED_SECONDS = 3600  # a folder without a lock is about to get one, or was left in that very moment


class Staging:
    """Files on their way into one folder, or into folders inside.

    Attributes:
        hidden: the folder in which they are written.
    """

    def __init__(self, hidden: Path) -> None:
        self.hidden = hidden
        self._places: dict[Path, Path] = {}

    def place(self, destination: Path) -> Path:
        """Where to write what becomes `destination`."""
        return self._places.setdefault(destination, self.hidden / f"new-{len(self._places)}")

    def publish(self) -> None:
        """Move every file to its place, in the order in which they were asked for; where one fails, none is moved.

        Raises:
            OSError: a place is taken by a folder, or the disk refuses.
        """
        moved: list[tuple[Path, Path | None]] = []
        made: list[Path] = []
        try:
            for destination, written in self._places.items():
                above = [folder for folder in destination.parents if not folder.exists()]
                destination.parent.mkdir(parents=True, exist_ok=True)
                made += reversed(above)
                before = self._kept(destination, len(moved))
                written.replace(destination)
                moved.append((destination, before))
        except BaseException:
            for destination, before in reversed(moved):
                destination.unlink() if before is None else before.replace(destination)
            for folder in reversed(made):
                folder.rmdir()
            raise

    def _kept(self, destination: Path, number: int) -> Path | None:
        """A second name of what is about to be replaced; None where nothing is."""
        if not os.path.lexists(destination):
            return None
        before = self.hidden / f"before-{number}"
        try:
            os.link(destination, before, follow_symlinks=False)
        except OSError:  # a file system without links
            shutil.copy2(destination, before, follow_symlinks=False)
        return before


@contextmanager
def staging(folder: Path) -> Iterator[Staging]:
    """Stage files for a folder; what is not published is gone at the end, however that comes.

    Raises:
        OSError: the folder cannot be written.
    """
    drop_leftovers(folder)
    hidden = folder / f"{PREFIX}{uuid4().hex}{SUFFIX}"
    lock = None
    try:
        hidden.mkdir(0o700)
        lock = _locked(hidden)
        yield Staging(hidden)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def whole_folder(place: Path) -> Iterator[Path]:
    """A new folder that becomes `place` at the end; where that fails, nothing of it is left, nor folders above it."""
    above = [folder for folder in place.parents if not folder.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with staging(place.parent) as files:
            unfinished = files.place(place)
            unfinished.mkdir()  # with the mode of any folder; the one around it is for this user alone
            yield unfinished
            files.publish()
    finally:
        with suppress(OSError):  # the first that holds something ends it
            for folder in above:
                folder.rmdir()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder among the system's temporary ones, with a lock like those of staged files."""
    with staging(Path(tempfile.gettempdir())) as files:
        yield files.hidden


def drop_leftovers(folder: Path) -> None:
    """Remove what processes that were killed had begun to write into a folder."""
    for hidden in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError):  # another process removes it as well, or it is another user's
            if _is_abandoned(hidden):
                shutil.rmtree(hidden)


def _locked(hidden: Path) -> int:
    """Lock a file and name it after that, so that nobody finds it unlocked while this process lives."""
    unnamed = hidden / f"{LOCK}-to-be"
    handle = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    with suppress(OSError):  # a file system without locks: nobody can lock it, so nobody takes it for abandoned
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unnamed.rename(hidden / LOCK)
    return handle


def _is_abandoned(hidden: Path) -> bool:
    try:
        handle = os.open(hidden / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - hidden.stat().st_mtime > UNLOCKED_SECONDS
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
