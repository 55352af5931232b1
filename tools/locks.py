"""The lock files of `./dev`: renews them, and compares them with pyproject.toml.

pyproject.toml has ranges. `locks/` has one version for each package, with the hashes of its files:

    locks/installer.txt    pip and uv, which install the rest
    locks/build.txt        what builds Penstock itself
    locks/runtime.txt      what Penstock needs to run
    locks/extras/NAME.txt  what an extra adds

All files come from one resolution, so any of them can be installed together. They hold for every
Python and platform that Penstock supports. Nothing here needs more than the standard library.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = "# Made by ./dev lock from pyproject.toml. Do not edit."
INCLUDES = "# includes: "
ASKED = "# asked: "


def canonical(name: str) -> str:
    """Return the normalised form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


# -- what pyproject.toml asks for ------------------------------------------------------------------


def asked(project: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the lock files below `locks/`, each with its requirements."""
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    return {
        "installer.txt": sorted(groups["installer"]),
        "build.txt": sorted(project["build-system"]["requires"] + groups["build"]),
        "runtime.txt": sorted(project["project"]["dependencies"]),
        **{
            f"extras/{name}.txt": sorted(
                requirement
                for each in [name, *included(name, project)]
                for requirement in extras[each]
                if not _names_of_extras(requirement, project)
            )
            for name in extras
        },
    }


def included(extra: str, project: Mapping[str, Any]) -> list[str]:
    """Return the extras that an extra includes, as in `dev = ["penstock[kafka,redis]"]`."""
    found: list[str] = []
    for requirement in project["project"]["optional-dependencies"][extra]:
        for name in _names_of_extras(requirement, project):
            found += [name, *included(name, project)]
    return sorted(set(found))


def _names_of_extras(requirement: str, project: Mapping[str, Any]) -> list[str]:
    own = re.fullmatch(rf"{project['project']['name']}\[([^\]]+)\]", requirement)
    return [name.strip() for name in own[1].split(",")] if own else []


def heads(project: Mapping[str, Any]) -> dict[str, str]:
    """Return the lock files below `locks/`, each with its first comment."""
    made = {}
    for name, requirements in asked(project).items():
        lines = [HEAD]
        if name.startswith("extras/") and (extras := included(Path(name).stem, project)):
            lines.append(INCLUDES + " ".join(extras))
        made[name] = "\n".join([*lines, *(ASKED + requirement for requirement in requirements)])
    return made


def read_project(root: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))


# -- what the lock files have ----------------------------------------------------------------------


def pins(text: str) -> list[tuple[str, str, str]]:
    """Return (package, version, marker) of each package in a lock file. The marker may be empty."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)(?: ; (.+?))? \\$", text, re.MULTILINE)
    return [(canonical(name), version, marker) for name, version, marker in found]


def stale(root: Path = ROOT) -> list[str]:
    """Return the lock files that were not made from this pyproject.toml."""
    wanted, locks = heads(read_project(root)), root / "locks"
    there = {
        str(path.relative_to(locks)): path.read_text("utf-8").partition("\n\n")[0]
        for path in locks.rglob("*.txt")
    }
    return sorted(
        name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)
    )


def installed(text: str) -> bool:
    """Return True if this Python has all packages of a lock file that have no marker."""
    have = {
        (canonical(package.name), package.version)
        for package in metadata.distributions()
        if package.name
    }
    return all((name, version) in have for name, version, marker in pins(text) if not marker)


# -- renewing them ---------------------------------------------------------------------------------


def renew(root: Path = ROOT, *, keep: bool) -> None:
    """Resolve all requirements together, then write each lock file.

    `keep` keeps the versions that still fit. Without it, each package moves to its newest version.
    """
    project, locks = read_project(root), root / "locks"
    wanted, head = asked(project), heads(project)
    python = project["project"]["requires-python"].removeprefix(">=")
    with tempfile.TemporaryDirectory() as directory:
        everything = Path(directory) / "everything.txt"
        if keep:
            known = {line for path in locks.rglob("*.txt") for line in _pinned(path)}
            everything.write_text("\n".join(sorted(known)), "utf-8")
        every = [requirement for part in wanted.values() for requirement in part]
        _compile(every, everything, python)
        for name, requirements in wanted.items():
            made = Path(directory) / "part.txt"
            made.unlink(missing_ok=True)
            _compile(
                requirements, made, python, "--generate-hashes", "--constraints", str(everything)
            )
            target = locks / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(head[name] + "\n\n" + made.read_text("utf-8"), "utf-8")
    for path in locks.rglob("*.txt"):
        if str(path.relative_to(locks)) not in wanted:
            path.unlink()


def _pinned(path: Path) -> list[str]:
    return [
        f"{name}=={version} ; {marker}" if marker else f"{name}=={version}"
        for name, version, marker in pins(path.read_text("utf-8"))
    ]


def _compile(requirements: Sequence[str], output: Path, python: str, *options: str) -> None:
    command = ["uv", "pip", "compile", "-", "--quiet", "--universal", "--python-version", python]
    command += ["--no-header", "--no-annotate", "--output-file", str(output), *options]
    subprocess.run(command, input="\n".join(requirements), text=True, check=True)


# -- the command line, for ./dev -------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["check"]:
            print(" ".join(stale()))
        case ["renew", *options]:
            renew(keep="--keep" in options)
        case ["extras"]:
            for path in sorted((ROOT / "locks" / "extras").glob("*.txt")):
                state = "installed" if installed(path.read_text("utf-8")) else "-"
                print(f"{path.stem:<10} {state}")
        case _:
            raise SystemExit(f"locks: unknown arguments {arguments}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
