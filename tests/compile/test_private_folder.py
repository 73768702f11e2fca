"""Files that nobody else can have written, and that are whole."""

import errno
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ferrum_jax.compile import private_folder
from ferrum_jax.compile.private_folder import PrivateFolder


@pytest.fixture
def folder(tmp_path: Path) -> PrivateFolder:
    return PrivateFolder(tmp_path / "root").child("inner")


def test_what_is_written_is_read_and_belongs_to_this_user_alone(folder: PrivateFolder):
    folder.write("a", b"one", b"two")
    assert folder.read("a") == b"onetwo"
    assert folder.sizes() == {"a": 6}
    assert os.stat(folder.path / "a").st_mode & 0o777 == 0o600
    for path in (folder.path, folder.path.parent):
        assert os.stat(path).st_mode & 0o777 == 0o700
    folder.write("a", b"three")
    assert folder.read("a") == b"three"


def test_what_is_not_there_is_told_from_what_must_not_be_used(folder: PrivateFolder):
    assert folder.sizes() == {}
    assert folder.children() == []
    with pytest.raises(FileNotFoundError):
        folder.read("a")
    folder.write("a", b"")
    with pytest.raises(FileNotFoundError):
        folder.read("b")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
@pytest.mark.parametrize("which", ["", "..", "a"])
def test_what_others_may_write_is_refused(folder: PrivateFolder, mode: int, which: str):
    folder.write("a", b"one")
    os.chmod(folder.path / which, mode)
    with pytest.raises(PermissionError, match="may be written by others"):
        folder.read("a")
    if which != "a":
        with pytest.raises(PermissionError, match="may be written by others"):
            folder.write("b", b"two")


def test_what_somebody_else_owns_is_refused(folder: PrivateFolder, monkeypatch: pytest.MonkeyPatch):
    folder.write("a", b"one")
    user = os.geteuid()
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {user}, this process runs as user {user + 1}"):
        folder.read("a")
    with pytest.raises(PermissionError, match="belongs to user"):
        folder.write("a", b"two")


@pytest.mark.skipif(not hasattr(os, "chown") or os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("which", ["", "..", "a"])
def test_a_file_or_folder_that_was_given_away_is_refused(folder: PrivateFolder, which: str):
    folder.write("a", b"one")
    os.chown(folder.path / which, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        folder.read("a")


@pytest.mark.parametrize("which", ["root", "inner", "file"])
def test_a_link_is_refused_even_to_what_would_do(tmp_path: Path, which: str):
    true = PrivateFolder(tmp_path / "true").child("inner")
    true.write("a", b"one")
    folder = PrivateFolder(tmp_path / "root").child("inner")
    if which == "root":
        folder.path.parent.symlink_to(true.path.parent)
    elif which == "inner":
        folder.path.parent.mkdir(mode=0o700)
        folder.path.symlink_to(true.path)
    else:
        folder.write("b", b"")
        (folder.path / "a").symlink_to(true.path / "a")
    with pytest.raises(PermissionError, match="is a link"):
        folder.read("a")


def test_what_is_no_regular_file_is_refused_without_waiting(folder: PrivateFolder):
    folder.write("a", b"one")
    os.mkfifo(folder.path / "pipe", 0o600)
    with pytest.raises(PermissionError, match="not a regular file"):
        folder.read("pipe")


def test_a_folder_in_place_of_a_file_is_refused_and_nothing_stays_open(
    folder: PrivateFolder, monkeypatch: pytest.MonkeyPatch
):
    folder.write("a", b"1")
    (folder.path / "b").mkdir(0o700)
    opened, closed, open_, close = [], [], os.open, os.close
    monkeypatch.setattr(os, "open", lambda *given, **named: opened.append(open_(*given, **named)) or opened[-1])
    monkeypatch.setattr(os, "close", lambda one: closed.append(one) or close(one))
    with pytest.raises(PermissionError, match="b is no"):
        folder.read("b")
    assert folder.read("a") == b"1"
    assert len(opened) >= 4
    assert sorted(closed) == sorted(opened)


def test_a_file_is_exchanged_whole_while_others_read_and_write_it(folder: PrivateFolder):
    contents = [bytes([at]) * 200_000 for at in range(4)]
    folder.write("a", contents[0])
    failures: list[object] = []

    def write(content: bytes) -> None:
        for _ in range(10):
            folder.write("a", content)

    def read() -> None:
        failures.extend(found[:1] for _ in range(40) if (found := folder.read("a")) not in contents)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(folder.sizes()) == os.listdir(folder.path) == ["a"]


def test_a_write_that_fails_leaves_what_was_there(folder: PrivateFolder, monkeypatch: pytest.MonkeyPatch):
    folder.write("a", b"one")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_folder.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        folder.write("a", b"two")
    assert folder.read("a") == b"one"
    assert os.listdir(folder.path) == ["a"]


def test_what_killed_writers_left_is_removed_once_it_is_old(folder: PrivateFolder):
    folder.write("a", b"one")
    for name, age in (("old", 2 * private_folder.ABANDONED), ("new", 0.0)):
        path = folder.path / f"{name}{private_folder.TEMPORARY}"
        path.write_bytes(b"half")
        changed = path.stat().st_mtime - age
        os.utime(path, (changed, changed))
    assert folder.sizes() == {"a": 3}
    folder.remove_abandoned()
    assert sorted(os.listdir(folder.path)) == ["a", "new.part"]
    folder.remove_all()
    assert not folder.path.exists()


WRITER = """
import sys
from pathlib import Path
from ferrum_jax.compile.private_folder import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1])).child("inner")
print("begun", flush=True)
while True:
    for letter in b"abc":
        folder.write("a", bytes([letter]) * 3_000_000, bytes([letter]) * 3_000_000)
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_file(folder: PrivateFolder):
    rng, left = random.Random(5), 0
    folder.write("a", b"a" * 6_000_000)
    for kills in itertools.count(1):
        command = [sys.executable, "-c", WRITER, str(folder.path.parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            time.sleep(rng.uniform(0.0, 0.05))
            process.kill()
        found = folder.read("a")
        assert len(found) == 6_000_000
        assert len(set(found)) == 1
        left += len(os.listdir(folder.path)) > 1
        if left and kills >= 4:  # some were killed in the middle of a file
            break
        assert kills < 60, "no kill came in the middle of a file"
    assert list(folder.sizes()) == ["a"]


def test_what_cannot_be_written_is_told_alike_each_time(folder: PrivateFolder, monkeypatch: pytest.MonkeyPatch):
    folder.write("a", b"one")
    opened = os.open

    def read_only(path: str, flags: int, *more: int, **where: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", path)
        return opened(path, flags, *more, **where)

    monkeypatch.setattr(os, "open", read_only)
    told = set()
    for _ in range(2):
        with pytest.raises(OSError, match="Read-only") as problem:
            folder.write("a", b"two")
        told.add(str(problem.value))
    assert len(told) == 1
    assert str(folder.path / "a") in told.pop()
