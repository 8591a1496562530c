"""Blocks in a directory: they outlive the process, are shared, and come whole or not
at all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.kv_tiers.block_file import Damaged, layout
from jaxserve.kv_tiers.disk_store import Changes, DiskStore
from jaxserve.moves import NO_KEY, Label

MODEL = b"fingerprint 16 b"
OTHER = b"another one, 16b"
ROWS = (2, 4, 1, 2, 3)
FORM = layout({"kv": (ROWS, np.dtype(ml_dtypes.bfloat16))})
FILE_BYTES = 128 + 2 * 2 * 4 * 2 * 3
ROOT = b"root key, 16 b.."


def label(name: str, column: int = 0) -> Label:
    return Label(name.encode().ljust(16, b"."), ROOT, column, weight_version=1)


A, B, C = label("a"), label("b", 3), label("c", 1)
MINE = Label((7).to_bytes(16, "little"), NO_KEY)


def block(seed: int) -> dict[str, np.ndarray]:
    """A block's rows, of any bits."""
    bits = np.random.default_rng(seed).integers(0, 2**16, ROWS, np.uint16)
    return {"kv": bits.view(ml_dtypes.bfloat16)}


def same(payload, seed: int) -> bool:
    (rows,) = payload.values()
    (expected,) = block(seed).values()
    return rows.shape == expected.shape and rows.tobytes() == expected.tobytes()


def open_store(directory: Path, model: bytes = MODEL) -> DiskStore:
    return DiskStore(directory, FORM, model)


def folder(directory: Path, model: bytes = MODEL) -> Path:
    return directory / model.hex()


def path_of(directory: Path, of: Label) -> Path:
    """The file of a block that many may read, by hand."""
    name = f"{of.key.hex()}.{of.parent.hex()}.{of.column}.kv"
    return folder(directory) / name


def names(directory: Path) -> set[str]:
    """Files of the model but for locks."""
    files = {path.name for path in folder(directory).iterdir()}
    return {name for name in files if not name.endswith(".lock")}


def age(*paths: Path, seconds: float = 60.0) -> None:
    """Let files be so old."""
    then = time.time() - seconds
    for path in paths:
        os.utime(path, (then, then))


def seen(of: Label) -> Label:
    """What the directory tells of a block."""
    return Label(of.key, of.parent, of.column)


# One engine ---------------------------------------------------------------------------


def test_a_block_comes_back_until_it_is_erased(tmp_path: Path) -> None:
    store = open_store(tmp_path / "not" / "there" / "yet")
    for seed, of in enumerate((A, B, MINE)):
        store.save(of, block(seed))
    for seed, of in enumerate((A, B, MINE)):
        assert same(store.load(of), seed)
    store.save(A, block(9))  # replaces it
    assert same(store.load(A), 9)
    store.erase(A)
    store.erase(A)  # once is enough
    store.erase(MINE)
    for of in (A, MINE, C):
        with pytest.raises(FileNotFoundError):
            store.load(of)
    assert same(store.load(B), 1) and store.scan() == [seen(B)]


def test_a_file_is_named_by_its_block_and_as_long_as_it_says(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(B, block(1))
    assert names(tmp_path) == {path_of(tmp_path, B).name}
    assert path_of(tmp_path, B).stat().st_size == FILE_BYTES


def test_blocks_outlive_the_engine_and_its_own_columns_do_not(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.save(A, block(0))
    first.save(MINE, block(1))
    (folder(tmp_path) / f"{first._mine}.99.half").write_bytes(b"half")
    first.close()
    first.close()  # once is enough
    assert [path.name for path in folder(tmp_path).iterdir()] == [
        path_of(tmp_path, A).name
    ]
    second = open_store(tmp_path)
    assert second.scan() == [seen(A)] and same(second.load(A), 0)
    with pytest.raises(FileNotFoundError):
        second.load(MINE)


def test_engines_do_not_see_each_others_columns(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    first.save(MINE, block(1))
    second.save(MINE, block(2))
    assert same(first.load(MINE), 1) and same(second.load(MINE), 2)
    assert first.scan() == [] and second.changes() == Changes()
    second.close()
    assert same(first.load(MINE), 1)


def test_blocks_are_scanned_by_use_and_of_equals_the_deepest_first(
    tmp_path: Path,
) -> None:
    store, d = open_store(tmp_path), label("d", 2)
    now = time.time()
    for of, ago_s in ((A, 300), (B, 100), (C, 200), (d, 200)):
        store.save(of, block(0))
        os.utime(path_of(tmp_path, of), (now - ago_s, now - ago_s))
    assert store.scan() == [seen(of) for of in (A, d, C, B)]
    store.load(A)  # is a use, and so is writing it
    age(path_of(tmp_path, A), seconds=50)
    store.save(C, block(2))
    assert store.scan() == [seen(of) for of in (d, B, A, C)]
    store.load(d)
    assert open_store(tmp_path).scan()[:2] == [seen(B), seen(A)]


# What is there is not what was written ------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 127, 128, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_length_is_removed(tmp_path: Path, size: int) -> None:
    store = open_store(tmp_path)
    store.save(A, block(0))
    os.truncate(path_of(tmp_path, A), size)
    with pytest.raises(Damaged):
        store.load(A)
    assert names(tmp_path) == set()
    with pytest.raises(FileNotFoundError):
        store.load(A)
    assert store.changes() == Changes()  # it was told already
    store.save(A, block(0))
    assert same(store.load(A), 0)


@pytest.mark.parametrize("at", [0, 30, 100, 127, 128, FILE_BYTES - 1])
def test_a_file_with_a_changed_byte_is_removed(tmp_path: Path, at: int) -> None:
    store = open_store(tmp_path)
    store.save(A, block(0))
    data = bytearray(path_of(tmp_path, A).read_bytes())
    data[at] ^= 1
    path_of(tmp_path, A).write_bytes(data)
    with pytest.raises(Damaged):
        store.load(A)
    assert names(tmp_path) == set()


def test_a_file_that_somebody_deleted_is_not_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(A, block(0))
    path_of(tmp_path, A).unlink()
    with pytest.raises(FileNotFoundError):
        store.load(A)
    assert store.changes() == Changes(gone=(A.key,)) and store.changes() == Changes()


def test_two_files_whose_contents_were_swapped_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for seed, of in enumerate((A, B)):
        store.save(of, block(seed))
    a, b = path_of(tmp_path, A), path_of(tmp_path, B)
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    for of in (A, B):
        with pytest.raises(Damaged):
            store.load(of)
    assert names(tmp_path) == set()


def test_a_block_of_other_weights_is_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(A, block(0))
    with pytest.raises(Damaged):
        store.load(A._replace(weight_version=2))


def test_models_do_not_share(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path, OTHER)
    store.save(A, block(0))
    assert other.scan() == [] and other.changes() == Changes()
    with pytest.raises(FileNotFoundError):
        other.load(A)
    # Nor where somebody copies the files.
    copied = folder(tmp_path, OTHER) / path_of(tmp_path, A).name
    copied.write_bytes(path_of(tmp_path, A).read_bytes())
    with pytest.raises(Damaged):
        other.load(A)
    assert not copied.exists() and same(store.load(A), 0)


KEY_HEX, PARENT_HEX = A.key.hex(), ROOT.hex()


def shorter(name: str) -> str:
    return name.lower().replace(KEY_HEX, "key").replace(PARENT_HEX, "parent")


@pytest.mark.parametrize(
    "name",
    [
        "README",
        "notes.txt",
        ".kv",
        "...kv",
        f"{KEY_HEX}.kv",
        f"{KEY_HEX}.{PARENT_HEX}.kv",
        f"{KEY_HEX}.{PARENT_HEX}.0.kv.part",
        f"{KEY_HEX}.{PARENT_HEX}.0.KV",
        f"{KEY_HEX}.{PARENT_HEX}.one.kv",
        f"{KEY_HEX}.{PARENT_HEX}..kv",
        f"{KEY_HEX[:-1]}.{PARENT_HEX}.0.kv",
        f"{KEY_HEX}.{'x' * 32}.0.kv",
    ],
    ids=shorter,
)
def test_foreign_files_are_left_alone(tmp_path: Path, name: str) -> None:
    check_is_foreign(tmp_path, name)


@pytest.mark.parametrize(
    "name",
    [
        f"{KEY_HEX}..0.kv",  # as if it were an engine's own
        f".{PARENT_HEX}.0.kv",
        "cafe.beef.0.kv",
        f"{KEY_HEX[:-2]}.{PARENT_HEX}.0.kv",
        f"{KEY_HEX}.{PARENT_HEX}00.0.kv",
        f"{KEY_HEX.upper()}.{PARENT_HEX}.0.kv",
        f"{KEY_HEX}.{PARENT_HEX}.-1.kv",
        f"{KEY_HEX}.{PARENT_HEX}.00.kv",
        f"{KEY_HEX}.{PARENT_HEX}.1_0.kv",
        f"{KEY_HEX}.{PARENT_HEX}.{2**32}.kv",
    ],
    ids=shorter,
)
def test_a_name_that_no_engine_gives_is_not_a_blocks(tmp_path: Path, name: str) -> None:
    check_is_foreign(tmp_path, name)


@pytest.mark.parametrize("name", ["backup", "*"])
def test_a_lock_that_no_engine_made_says_nothing(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    store.save(A, block(0))
    lock, other = (folder(tmp_path) / f"{name}.{kind}" for kind in ("lock", "tar"))
    for path in (lock, other):
        path.write_bytes(b"mine")
        age(path)
    open_store(tmp_path).close()
    assert lock.exists() and other.exists() and same(store.load(A), 0)


def check_is_foreign(directory: Path, name: str) -> None:
    """Nobody sees it, and nobody removes it."""
    open_store(directory).close()
    path = folder(directory) / name
    path.write_bytes(b"mine")
    age(path, seconds=3600)
    store = open_store(directory)
    assert store.scan() == [] and store.changes() == Changes()
    store.save(C, block(0))
    store.close()
    assert path.read_bytes() == b"mine"


# What fails ---------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made_is_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    check_takes_nothing(tmp_path / "file" / "below")
    check_takes_nothing(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_directory_that_went_away_is_empty(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(A, block(0))
    folder(tmp_path).rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").joinpath("more").mkdir()
    assert store.scan() == []
    with pytest.raises(OSError):
        store.save(B, block(0))
    with pytest.raises(OSError):
        store.load(A)
    store.close()


def test_a_directory_that_cannot_be_written_to_can_be_read(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.save(A, block(0))
    first.close()
    folder(tmp_path).chmod(0o500)
    if os.access(folder(tmp_path), os.W_OK):
        pytest.skip("modes do not bind root")
    try:
        store = open_store(tmp_path)
        assert store.scan() == [seen(A)] and same(store.load(A), 0)
        with pytest.raises(PermissionError):
            store.save(B, block(1))
        store.erase(A)
        assert same(store.load(A), 0)
        store.close()
        folder(tmp_path).chmod(0o000)
        check_takes_nothing(tmp_path)
    finally:
        folder(tmp_path).chmod(0o700)
    assert names(tmp_path) == {path_of(tmp_path, A).name}


def check_takes_nothing(directory: Path) -> None:
    store = open_store(directory)
    assert store.scan() == [] and store.changes() == Changes()
    for of in (A, MINE):
        with pytest.raises(OSError):
            store.save(of, block(0))
        with pytest.raises(OSError):
            store.load(of)
        store.erase(of)
    assert store.scan() == [] and store.changes() == Changes()
    store.close()


@pytest.mark.parametrize("of", [A, MINE])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, of: Label
) -> None:
    store = open_store(tmp_path)

    def half(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write", half)
        with pytest.raises(OSError) as raised:
            store.save(of, block(0))
    assert raised.value.errno == error
    assert names(tmp_path) == set()
    assert store.scan() == [] and store.changes() == Changes()
    store.save(of, block(0))
    assert same(store.load(of), 0)


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.save(A, block(0))

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(store, "_write", full)
    with pytest.raises(OSError):
        store.save(A, block(1))
    assert same(store.load(A), 0)


def test_a_file_that_cannot_take_its_name_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path_of(tmp_path, A).mkdir()
    with pytest.raises(OSError):
        store.save(A, block(0))
    assert names(tmp_path) == {path_of(tmp_path, A).name}
    with pytest.raises(OSError):
        store.load(A)


def test_a_file_appears_under_its_name_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    write, looked = store._write, []

    def watched(path: Path, data: bytes) -> None:
        write(path, data[:50])
        looked.append((other.scan(), other.changes()))
        write(path, data)
        looked.append((other.scan(), other.changes()))

    monkeypatch.setattr(store, "_write", watched)
    store.save(A, block(0))
    assert looked == [([], Changes())] * 2
    assert other.changes() == Changes(found=(seen(A),))


# Several engines ----------------------------------------------------------------------


def test_engines_hear_of_each_others_blocks(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    first.save(A, block(0))
    assert first.changes() == Changes()  # its own are no news
    assert second.changes() == Changes(found=(seen(A),))
    assert second.changes() == Changes()
    assert same(second.load(A), 0)
    second.save(B, block(1))
    second.save(A, block(0))
    first.save(C, block(2))
    first.erase(A)
    assert first.changes() == Changes(found=(seen(B),))
    assert second.changes() == Changes(found=(seen(C),), gone=(A.key,))
    second.erase(B)
    second.erase(C)
    assert second.changes() == Changes()
    changes = first.changes()
    assert changes.found == () and sorted(changes.gone) == [B.key, C.key]


def test_what_was_scanned_is_no_news(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.save(A, block(0))
    second = open_store(tmp_path)
    assert second.scan() == [seen(A)] and second.changes() == Changes()
    first.erase(A)
    assert second.changes() == Changes(gone=(A.key,))


def test_a_file_that_comes_back_is_news_again(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    for seed in range(2):
        first.save(A, block(seed))
        assert second.changes() == Changes(found=(seen(A),))
        assert same(second.load(A), seed)
        first.erase(A)
        assert second.changes() == Changes(gone=(A.key,))


@pytest.mark.parametrize("first", ["save", "erase"])
def test_what_it_does_itself_meanwhile_is_no_news(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread looks, while another saves before the directory is read and erases
    after, or the other way round."""
    store, scandir = open_store(tmp_path), os.scandir
    orders = [lambda: store.save(A, block(0)), lambda: store.erase(A)]
    if first == "erase":
        store.save(A, block(0))
        orders.reverse()
    threads = [threading.Thread(target=order) for order in orders]

    @contextlib.contextmanager
    def slow(path: Path):
        threads[0].start()
        threads[0].join(0.2)  # it may be kept waiting
        with scandir(path) as entries:
            found = list(entries)
        threads[1].start()
        threads[1].join(0.2)
        yield found

    monkeypatch.setattr(os, "scandir", slow)
    assert store.changes() == Changes()
    monkeypatch.undo()
    for thread in threads:
        thread.join()
    assert store.changes() == Changes()


# Engines that died --------------------------------------------------------------------

DIES = """
import sys, time
import ml_dtypes, numpy as np
from tests.kv_tiers.test_disk_store import A, MINE, block, open_store
from pathlib import Path

store = open_store(Path(sys.argv[1]))
store.save(A, block(0))
store.save(MINE, block(1))

def stuck(path, data):
    path.write_bytes(data[:len(data) // 2])
    print("ready", flush=True)
    time.sleep(600)

store._write = stuck
store.save(A, block(0))
"""


def test_what_a_killed_engine_left_is_swept(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    engine = subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"ready\n"
        locks = list(folder(tmp_path).glob("*.lock"))
        files = names(tmp_path)
        assert len(locks) == 1 and len(files) == 3  # two blocks, and half of one
        age(*locks)
        # While it lives, nobody touches what is its own, however old.
        open_store(tmp_path).close()
        assert names(tmp_path) == files
        engine.send_signal(signal.SIGKILL)
        assert engine.wait() == -signal.SIGKILL
    finally:
        engine.kill()
        engine.communicate()
    assert names(tmp_path) == files and locks[0].exists()
    store = open_store(tmp_path)
    assert names(tmp_path) == {path_of(tmp_path, A).name} and not locks[0].exists()
    assert store.scan() == [seen(A)] and same(store.load(A), 0)


def left(directory: Path, engine: str, lock_age_s: float) -> list[Path]:
    """Files as of an engine that has died."""
    paths = [
        folder(directory) / f"{engine}.{name}"
        for name in ("lock", "3.half", f"{MINE.key.hex()}.kv")
    ]
    for path in paths:
        path.write_bytes(b"left")
    age(paths[0], seconds=lock_age_s)
    return paths


def test_only_dead_engines_files_are_swept(tmp_path: Path) -> None:
    live = open_store(tmp_path)
    live.save(MINE, block(0))
    live.save(A, block(1))
    half = folder(tmp_path) / f"{live._mine}.5.half"
    half.write_bytes(b"half")
    lock = folder(tmp_path) / f"{live._mine}.lock"
    age(lock, half, seconds=3600)
    dead = left(tmp_path, "0123456789abcdef", lock_age_s=60)
    young = left(tmp_path, "fedcba9876543210", lock_age_s=0)  # about to lock its file
    stranger = folder(tmp_path) / "0123456789abcdefg.half"
    stranger.write_bytes(b"not an engine's")
    open_store(tmp_path).close()
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in [*young, stranger, lock, half])
    assert same(live.load(MINE), 0) and same(live.load(A), 1)
    # Once it is closed nothing of it is left.
    live.close()
    assert not lock.exists() and not half.exists()
    assert same(open_store(tmp_path).load(A), 1)


def test_each_models_folder_is_swept_alone(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    dead = left(tmp_path, "0123456789abcdef", lock_age_s=60)
    open_store(tmp_path, OTHER).close()
    assert all(path.exists() for path in dead)
    open_store(tmp_path).close()
    assert not any(path.exists() for path in dead)
