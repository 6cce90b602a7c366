"""A copy of the current folder for each run, in which it finds what lies around the folder too."""
import collections
import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from check_conversion.verdict import CannotSay

MOST = 2**30  # bytes to copy
NOT_COPIED = (".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache",
              ".ipynb_checkpoints", "node_modules", ".cache", ".tox", ".nox")


def seen(path):
    """What shows that it was changed, or None."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_size, found.st_mtime_ns


def open_in_this_job():
    """Files that the check itself writes to, or what its output is piped to: | tee log.txt."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getpgid(int(process.name)) == os.getpgrp():
                yield from filter(None, map(inode, (process / "fd").iterdir()))


def inode(path):
    with contextlib.suppress(OSError):  # it was closed meanwhile
        return path.stat().st_ino


class Workspace:
    """What of a folder is copied, what is linked, and what is left out."""

    def __init__(self, folder, links=(), without=()):
        self.folder = Path(folder).resolve()
        self.links = {Path(os.path.normpath(self.folder / link)) for link in links}
        self.without = {path for pattern in without for path in self.folder.glob(pattern)}
        for link in self.links:
            if not link.exists() or not link.is_relative_to(self.folder):
                raise CannotSay(f"--link {link.name}: there is no such folder here")
        self.entries = [*self.walk(self.folder)]
        self.check_size()
        # What is linked is read only; what a link to a folder above leads to changes by others too.
        self.protected = {self.folder, *(link.resolve() for link in self.entries if self.is_linked(link))}
        self.linked = self.protected - {self.folder, *self.folder.parents}
        self.before = self.state()
        self.home = Path(tempfile.mkdtemp(prefix="check_conversion.")).resolve()

    def is_linked(self, path):
        """Also a virtual environment, for it is used by its name, perhaps."""
        return path.is_symlink() or path in self.links or any(
            (path / mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))

    def walk(self, folder):
        """Each file, folder and link to be made; a folder before what is in it."""
        with contextlib.suppress(PermissionError):
            for path in sorted(folder.iterdir()):
                if path.name in NOT_COPIED or path in self.without:
                    continue
                if self.is_linked(path) or path.is_dir() or (path.is_file() and os.access(path, os.R_OK)):
                    yield path
                if path.is_dir() and not self.is_linked(path):
                    yield from self.walk(path)

    def check_size(self):
        sizes = collections.Counter()
        for path in self.entries:
            if path.is_file() and not path.is_symlink():
                sizes[path.relative_to(self.folder).parts[0]] += path.stat().st_size
        if sizes.total() > MOST:
            largest = sizes.most_common(3)
            names = ", ".join(f"{name} ({size / 1e9:.1f} GB)" for name, size in largest if size > 5e7)
            raise CannotSay(f"each run would copy {sizes.total() / 1e9:.1f} GB of this folder: {names}; "
                            f"--link {largest[0][0]} lets the runs read it in place")

    def copy(self):
        """A new root, in which the folder's copy has the path that the folder has."""
        root = Path(tempfile.mkdtemp(dir=self.home))
        copy = root / self.folder.relative_to("/")
        copy.mkdir(parents=True)
        for folder in self.folder.parents[:3]:  # ../data is found; folders higher up may hold all users of a cluster
            with contextlib.suppress(PermissionError):
                for path in folder.iterdir():
                    if path not in (self.folder, self.home, *self.folder.parents):
                        (root / path.relative_to("/")).symlink_to(path)
        for path in self.entries:
            new = copy / path.relative_to(self.folder)
            if path.is_symlink():  # within the copy, or to where it leads now
                target = Path(os.path.normpath(path.parent / os.readlink(path)))
                inside = target.is_relative_to(self.folder)
                new.symlink_to(copy / target.relative_to(self.folder) if inside else target)
            elif self.is_linked(path):
                new.symlink_to(path)
            elif path.is_dir():
                new.mkdir()
            else:
                shutil.copy2(path, new)
        return root, copy

    def in_copy(self, command, copy):
        """The command, with paths below the folder turned into those of the copy."""
        for path in {str(self.folder), os.environ.get("PWD", str(self.folder))}:
            if os.path.realpath(path) == str(self.folder):
                command = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", lambda _: str(copy), command)
        return command

    def unchanged(self, copy):
        """Names of the files that a run has left as they were copied."""
        return {str(path.relative_to(self.folder)) for path in self.entries
                if seen(copy / path.relative_to(self.folder)) == seen(path)}

    def state(self):
        """All in this folder by size and time, and of linked folders the top, for they may be large."""
        tops = [path for linked in self.linked if linked.is_dir() for path in linked.glob("*")]
        return {path: seen(path) for path in (self.folder, *self.entries, *self.without, *self.linked, *tops)}

    def changed(self):
        """What is no longer as it was, by no write that Python would have seen; but for the check's own output."""
        after, outputs = self.state(), {*open_in_this_job()}
        return sorted(path for path, was in self.before.items()
                      if after.get(path) != was and path not in self.home.parents  # TMPDIR may lie here
                      and not (path.exists() and path.stat().st_ino in outputs))

    def remove(self):
        shutil.rmtree(self.home, ignore_errors=True)
