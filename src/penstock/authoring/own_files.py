"""Hash of a pipeline file and of the modules that it imports from its own folder.

The imports are read from the source code, so that imports inside functions count too. The hash
depends on the bytes of the files and on their names inside the folder. It is the same on every
machine and in every role.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 1000  # files of one pipeline


def hash_files(path: Path, source: bytes) -> str:
    """Return the hash of the pipeline file `path`, whose bytes are `source`, and of its imports."""
    folder = path.resolve().parent
    digest = hashlib.blake2b(digest_size=12)
    files = {"": source} | (_imported(folder, source) if path.suffix == ".py" else {})
    for name in sorted(files):
        for part in (name.encode("utf-8", "surrogateescape"), files[name]):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _imported(folder: Path, source: bytes) -> dict[str, bytes]:
    """Return the bytes of all imported files by their name inside the folder."""
    found: dict[str, bytes] = {}
    open_files = [(Path(), source)]
    while open_files and len(found) < MAX_FILES:
        package, source = open_files.pop()
        for module in _modules(source, package):
            for name in _candidates(module):
                if name.as_posix() in found:
                    continue
                try:
                    body = (folder / name).read_bytes()
                except (OSError, ValueError):
                    continue  # no file of this folder: another package, or a name in a module
                found[name.as_posix()] = body
                open_files.append((name.parent, body))
    return found


def _modules(source: bytes, package: Path) -> Iterator[Path]:
    """Return the imported modules as paths without a suffix. `package` contains the source."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # the import reports the error, or the module is never imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Path(*alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(package.parts) + 1:
                continue
            base = Path(*package.parts[: len(package.parts) - node.level + 1])
            start = base if node.level else Path()
            module = start.joinpath(*(node.module or "").split("."))
            yield module
            for alias in node.names:  # a name in the module, or a module of the package
                yield module / alias.name


def _candidates(module: Path) -> Iterator[Path]:
    """Return the files that an import of `module` may execute, with its packages."""
    for depth in range(1, len(module.parts) + 1):
        part = Path(*module.parts[:depth])
        yield part / "__init__.py"
        yield part.with_name(part.name + ".py")
