"""KV blocks as files in a directory, which outlives the process and may be shared.

Owns names of files and how they come and go; a block's file appears whole or not at
all. Never decides what is kept, and has no thread: calls take as long as the disk does.
One thread may read while another writes.

A model's blocks lie in a directory of their own, named by its fingerprint:
`<key>.<parent>.<column>.kv`. What only one engine reads, and files half written, bear
that engine's name; they go when it closes, or when another finds that it has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import NamedTuple

from jaxserve.kv_tiers.block_file import DIGEST_BYTES, Damaged, Layout, decode, encode
from jaxserve.kv_tiers.host_pool import Payload
from jaxserve.moves import NO_KEY, Label

_MADE_S = 10.0
"""An engine has locked its file by then."""


class Changes(NamedTuple):
    """What others have done to the directory since it was last looked at."""

    found: tuple[Label, ...] = ()
    gone: tuple[bytes, ...] = ()  # keys


class DiskStore:
    """Blocks of one model under a directory.

    A directory that cannot be made or read is empty, and does not take anything.

    Args:
      directory: made if need be.
      form: of a block.
      fingerprint: 16 bytes that say which model and weights the blocks are of.
    """

    def __init__(self, directory: str | Path, form: Layout, fingerprint: bytes):
        self._directory = directory
        self._form = form
        self._fingerprint = fingerprint
        self._folder = Path(directory) / fingerprint.hex()
        self._mine = secrets.token_hex(8)
        self._count = itertools.count()
        self._known: set[str] = set()  # names of files of blocks
        # While a name comes or goes, and while all are read: a file of ours that did so
        # in between would be taken for another engine's.
        self._naming = threading.Lock()
        self._lock: int | None = None
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            flags = os.O_CREAT | os.O_RDWR
            self._lock = os.open(self._folder / f"{self._mine}.lock", flags, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _sweep(self) -> None:
        """Remove what engines left that have died: their locks are free."""
        for lock in self._folder.glob("*.lock"):
            if not re.fullmatch("[0-9a-f]{16}", lock.stem):
                continue  # not an engine's
            with contextlib.suppress(OSError):
                if time.time() - lock.stat().st_mtime < _MADE_S:
                    continue
                handle = os.open(lock, os.O_RDWR)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._remove_of(lock.stem)
                finally:
                    os.close(handle)

    def _remove_of(self, engine: str) -> None:
        for path in self._folder.glob(f"{engine}.*"):
            path.unlink(missing_ok=True)

    def of(self, fingerprint: bytes) -> DiskStore:
        """The blocks of other weights of this model in the same directory."""
        return DiskStore(self._directory, self._form, fingerprint)

    def clear(self) -> None:
        """Remove every block, and close."""
        for label in self.scan():
            self.erase(label)
        self.close()
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # unless others use it

    def close(self) -> None:
        """Remove what only this engine could read."""
        with contextlib.suppress(OSError):
            self._remove_of(self._mine)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _name(self, label: Label) -> str:
        if label.parent == NO_KEY:
            return f"{self._mine}.{label.key.hex()}.kv"
        return _block_name(label)

    # Blocks ---------------------------------------------------------------------------

    def save(self, label: Label, payload: Payload) -> None:
        """Write a block.

        Raises:
          OSError: it could not be written, and nothing of it is left.
        """
        data = encode(label, self._fingerprint, payload)
        half = self._folder / f"{self._mine}.{next(self._count)}.half"
        try:
            self._write(half, data)
            name = self._name(label)
            with self._naming:
                os.replace(half, self._folder / name)
                if label.parent != NO_KEY:
                    self._known.add(name)
        except OSError:
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)
            raise

    def load(self, label: Label) -> Payload:
        """Read a block, which counts as its use.

        Raises:
          OSError: it is not there, or cannot be read.
          Damaged: what is there is not this block; it is removed.
        """
        path = self._folder / self._name(label)
        try:
            payload = decode(self._read(path), label, self._fingerprint, self._form)
        except Damaged:
            self.erase(label)
            raise
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload

    def erase(self, label: Label) -> None:
        """Remove a block, if it is there and can be removed."""
        name = self._name(label)
        with self._naming, contextlib.suppress(OSError):
            self._known.discard(name)
            (self._folder / name).unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def _read(self, path: Path) -> bytes:
        return path.read_bytes()

    # The directory --------------------------------------------------------------------

    def scan(self) -> list[Label]:
        """All blocks there are, the longest unused first."""
        used: list[tuple[float, Label]] = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                label = _label(entry.name)
                if label is not None:
                    with contextlib.suppress(OSError):
                        # Of blocks used at once, the deepest leaves first.
                        used.append((entry.stat().st_mtime, label))
                        self._known.add(entry.name)
        used.sort(key=lambda item: (item[0], -item[1].column))
        return [label for _, label in used]

    def changes(self) -> Changes:
        """What others have written and removed."""
        with self._naming:
            try:
                with os.scandir(self._folder) as entries:
                    labels = {entry.name: _label(entry.name) for entry in entries}
            except OSError:
                return Changes()
            names = {name for name, label in labels.items() if label is not None}
            found, gone = sorted(names - self._known), sorted(self._known - names)
            self._known = names
        return Changes(
            tuple(label for name in found if (label := labels[name])),
            tuple(label.key for name in gone if (label := _label(name))),
        )


def _label(name: str) -> Label | None:
    """What a file's name says of it; None if it is not a block that many may read."""
    parts = name.split(".")
    if len(parts) != 4 or parts[3] != "kv":
        return None
    try:
        key, parent, column = bytes.fromhex(parts[0]), bytes.fromhex(parts[1]), parts[2]
        label = Label(key, parent, int(column))
    except ValueError:
        return None
    whole = len(key) == len(parent) == DIGEST_BYTES and 0 <= label.column < 2**32
    return label if whole and name == _block_name(label) else None


def _block_name(label: Label) -> str:
    """The name of the file of a block that many may read."""
    return f"{label.key.hex()}.{label.parent.hex()}.{label.column}.kv"
