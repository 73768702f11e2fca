"""A folder whose files may be trusted as far as this user is: nobody else can write them, and none is half written."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEMPORARY = ".part"  # what a file is called until it is whole
ABANDONED = 3600.0  # seconds after which nobody writes a temporary file any more


@dataclass(frozen=True)
class PrivateFolder:
    """A folder, and those above it that have to be as private.

    Every access opens the folders again, refuses links, and checks owner and permissions of what is open, so that
    nothing can be replaced between check and use.
    """

    path: Path
    within: "PrivateFolder | None" = None

    def child(self, name: str) -> "PrivateFolder":
        """Returns a folder in this one."""
        return PrivateFolder(self.path / name, self)

    def read(self, name: str) -> bytes:
        """Reads a file.

        Raises:
            FileNotFoundError: there is no such file or folder.
            PermissionError: somebody else owns or may write the file or the folder, or it is a link.
            OSError: it cannot be read.
        """
        with self._opened() as folder:
            try:  # without blocking, as it might be a pipe
                found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except OSError as problem:
                raise _explained(problem, self.path / name) from None
            try:
                self._check_owned(found, self.path / name, stat.S_ISREG, "a regular file")
                with open(found, "rb", closefd=False) as file:
                    return file.read()
            finally:
                os.close(found)

    def write(self, name: str, *pieces: bytes) -> None:
        """Writes a file: whole or not at all, whenever the process or the machine stops. Makes the folders.

        Raises:
            PermissionError, OSError: as `read`.
        """
        temporary = f"{name}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}"
        with self._opened(create=True) as folder:
            try:
                made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            except OSError as problem:
                raise _explained(problem, self.path / name) from None
            try:
                with open(made, "wb") as file:
                    file.writelines(pieces)
                    file.flush()
                    os.fsync(made)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def sizes(self) -> dict[str, int]:
        """Bytes of every whole file, by name; none where there is no folder."""
        return {name: found.st_size for name, found in self._listed() if not name.endswith(TEMPORARY)}

    def children(self) -> list["PrivateFolder"]:
        """The folders in this one."""
        return [self.child(name) for name, found in self._listed(stat.S_ISDIR)]

    def remove_abandoned(self) -> None:
        """Removes what writers that were killed have left."""
        before = time.time() - ABANDONED
        names = [name for name, found in self._listed() if name.endswith(TEMPORARY) and found.st_mtime < before]
        if names:
            self.remove(*names)

    def remove(self, *names: str) -> None:
        """Removes files; those that are gone already are no error."""
        with self._opened() as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)

    def remove_all(self) -> None:
        """Removes the folder and the files in it.

        Raises:
            OSError: it holds a folder, or cannot be removed.
        """
        self.remove(*(name for name, _ in self._listed()))
        os.rmdir(self.path)

    def _listed(self, kind=stat.S_ISREG) -> list[tuple[str, os.stat_result]]:
        found = []
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            for name in sorted(os.listdir(folder)):
                with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
                    found.append((name, os.stat(name, dir_fd=folder, follow_symlinks=False)))
        return [(name, status) for name, status in found if kind(status.st_mode)]

    @contextlib.contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[int]:
        """Opens the folder, yields its descriptor."""
        if not hasattr(os, "geteuid"):
            raise PermissionError(f"{self.path}: permissions of folders cannot be checked on this platform")
        with contextlib.ExitStack() as stack:
            above = None if self.within is None else stack.enter_context(self.within._opened(create=create))
            where = self.path if self.within is None else Path(self.path.name)
            if create:
                with contextlib.suppress(FileExistsError):
                    if above is None:
                        where.parent.mkdir(parents=True, exist_ok=True)
                    os.mkdir(where, 0o700, dir_fd=above)
            try:
                folder = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            except OSError as problem:
                raise _explained(problem, self.path) from None
            stack.callback(os.close, folder)
            self._check_owned(folder, self.path, stat.S_ISDIR, "a folder")
            yield folder

    @staticmethod
    def _check_owned(descriptor: int, path: Path, kind, name: str) -> None:
        found = os.fstat(descriptor)
        if not kind(found.st_mode):
            raise PermissionError(f"{path} is not {name}")
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {found.st_uid}, this process runs as user {os.geteuid()}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o}): `chmod go-w` it"
            )


def _explained(problem: OSError, path: Path) -> OSError:
    """Translates the error of opening a link; other errors are raised as they are."""
    if problem.errno in (errno.ELOOP, errno.ENOTDIR):
        return PermissionError(f"{path} is a link, or a file in place of a folder")
    return type(problem)(problem.errno, problem.strerror, os.fspath(path))
