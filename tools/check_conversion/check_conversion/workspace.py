"""A copy of the current folder for each run, in which it finds what lies around the folder too."""
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


def is_environment(folder):
    """Used by its name, perhaps: it is linked."""
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()


def seen(path):
    """What shows that it was changed."""
    found = path.lstat()
    return found.st_size, found.st_mtime_ns


class Workspace:
    """What of a folder is copied, what is linked, and what is left out."""

    def __init__(self, folder, links=(), without=()):
        self.folder = Path(folder).resolve()
        self.links = {self.folder / link for link in links}
        self.without = {path for pattern in without for path in self.folder.glob(pattern)}
        for link in self.links:
            if not link.exists() or not link.is_relative_to(self.folder):
                raise CannotSay(f"--link {link.name}: there is no such folder here")
        self.protected = {self.folder, *map(Path.resolve, self.links)}  # nothing is written there
        self.entries = [*self.walk(self.folder)]
        self.check_size()
        self.protected |= {link.resolve() for link, _ in self.entries if link.is_symlink()}
        self.before = self.state()
        self.home = Path(tempfile.mkdtemp(prefix="check_conversion.")).resolve()

    def walk(self, folder):
        """Each file, folder and link to be made, and its size; a folder before what is in it."""
        with contextlib.suppress(PermissionError):
            for path in sorted(folder.iterdir()):
                if path.name in NOT_COPIED or path in self.without:
                    continue
                if path.is_symlink() or path in self.links or is_environment(path):
                    yield path, 0
                elif path.is_dir():
                    yield path, 0
                    yield from self.walk(path)
                elif path.is_file() and os.access(path, os.R_OK):
                    yield path, path.stat().st_size

    def check_size(self):
        sizes = {}
        for path, size in self.entries:
            top = path.relative_to(self.folder).parts[0]
            sizes[top] = sizes.get(top, 0) + size
        if (total := sum(sizes.values())) > MOST:
            largest = sorted(sizes, key=sizes.get, reverse=True)[:3]
            names = ", ".join(f"{name} ({sizes[name] / 1e9:.1f} GB)" for name in largest
                              if sizes[name] > 0.05 * total)
            raise CannotSay(f"each run would copy {total / 1e9:.1f} GB of this folder: {names}; "
                            f"--link {largest[0]} lets the runs read it in place")

    def copy(self):
        """A new root, in which the folder's copy has the path that the folder has."""
        root = Path(tempfile.mkdtemp(dir=self.home))
        self.link_surroundings(root)
        copy = root / self.folder.relative_to("/")
        copy.mkdir()
        for path, _ in self.entries:
            new = copy / path.relative_to(self.folder)
            if path.is_symlink():
                new.symlink_to(self.target_in(copy, path))
            elif path in self.links or is_environment(path):
                new.symlink_to(path)
            elif path.is_dir():
                new.mkdir()
            else:
                shutil.copy2(path, new)
        return root, copy

    def target_in(self, copy, link):
        """Where a link leads: within the copy, or to where it leads now, to be read only."""
        target = Path(os.path.normpath(link.parent / os.readlink(link)))
        return copy / target.relative_to(self.folder) if target.is_relative_to(self.folder) else target

    def link_surroundings(self, root):
        """The folders above, with a link to all else in three of them: ../data is found."""
        (root / self.folder.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        for folder in self.folder.parents[:3]:  # higher ones may hold all users of a cluster
            above = root / folder.relative_to("/")
            with contextlib.suppress(PermissionError):
                for path in folder.iterdir():
                    if path not in (self.folder, self.home, *self.folder.parents):
                        (above / path.name).symlink_to(path)

    def in_copy(self, command, copy):
        """The command, with paths below the folder turned into those of the copy."""
        def turned(found):
            new = copy / found[1].lstrip("/")
            return str(new) if new.exists() else found[0]
        here = {str(self.folder), os.environ.get("PWD", str(self.folder))}
        here = {path for path in here if os.path.realpath(path) == str(self.folder)}
        for path in here:
            below = rf"(?<![\w./-]){re.escape(path)}((?:/[^\s'\";:]*)?)(?![\w.-])"
            command = re.sub(below, turned, command)
        return command

    def unchanged(self, copy):
        """Names of the files that a run has left as they were copied."""
        names = (path.relative_to(self.folder) for path, _ in self.entries)
        return {str(name) for name in names if os.path.lexists(copy / name)
                and os.path.lexists(self.folder / name) and seen(copy / name) == seen(self.folder / name)}

    def state(self):
        """All in this folder by size and time, and of linked folders the top, for they may be large. What a link to a
        folder above leads to is protected, but changes by others too."""
        paths = [self.folder, *(path for path, _ in self.entries), *self.without]
        for linked in self.protected - {self.folder, *self.folder.parents}:
            paths += [linked, *(linked.glob("*") if linked.is_dir() else ())]
        found = {}
        for path in paths:
            with contextlib.suppress(OSError):
                found[path] = seen(path)
        return found

    def changed(self, outputs=()):
        """What is no longer as it was, by no write that Python would have seen; outputs: open files that may grow."""
        after, ours = self.state(), [*map(os.fstat, outputs)]
        return sorted(path for path, was in self.before.items() if after.get(path) != was and not (
            path in after and any(os.path.samestat(path.lstat(), one) for one in ours)))

    def remove(self):
        shutil.rmtree(self.home, ignore_errors=True)
