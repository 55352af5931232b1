"""Jars and Connect plugins from Maven Central, downloaded once for all clones."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .packages import program
from .state import cache_directory, locked
from .trouble import ServiceError, say

JAVA = 17
# With its version, because Debian's Maven would use an older one.
DEPENDENCY_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"


def java() -> str:
    found = program("java", "default-jre-headless", "Kafka and ElasticMQ run on Java")
    output = subprocess.run([found, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', output)
    if version is None or int(version[1]) < JAVA:
        raise ServiceError(
            f"Java {JAVA} or newer is needed, "
            f"and {found} is {output.splitlines()[0] if output else 'an unknown version'}",
            f"install a JRE {JAVA} and put it first on PATH",
        )
    return found


def jars(name: str, artifacts: Sequence[str]) -> Path:
    """Return a directory with these artifacts (group:artifact:version) and their dependencies."""

    def fetch(directory: Path) -> None:
        pom = directory / "pom.xml"
        pom.write_text(_pom(artifacts))
        _maven(
            [
                "-f",
                str(pom),
                f"{DEPENDENCY_PLUGIN}:copy-dependencies",
                "-DincludeScope=runtime",
                f"-DoutputDirectory={directory}",
            ]
        )

    return _installed(name, artifacts, fetch)


def plugins(name: str, artifacts: Sequence[str]) -> Path:
    """Return a directory with these archives unpacked, each in its own directory.

    The form of an artifact is group:artifact:version:tar.gz:classifier.
    """

    def fetch(directory: Path) -> None:
        for artifact in artifacts:
            _maven(
                [
                    f"{DEPENDENCY_PLUGIN}:copy",
                    f"-Dartifact={artifact}",
                    f"-DoutputDirectory={directory}",
                ]
            )
        for archive in directory.glob("*.tar.gz"):
            with tarfile.open(archive) as packed:
                if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
                    packed.extractall(directory, filter="data")
                else:
                    packed.extractall(directory)
            archive.unlink()

    return _installed(name, artifacts, fetch)


def _installed(name: str, artifacts: Sequence[str], fetch: Callable[[Path], None]) -> Path:
    """Return the directory of these artifacts. Download them if it does not exist.

    They are downloaded into a temporary directory, which is then renamed. So the directory is never
    incomplete. Its name contains a hash of the artifacts.
    """
    digest = hashlib.sha256("\n".join(artifacts).encode()).hexdigest()[:12]
    place = cache_directory() / f"jars-{name}-{digest}"
    if place.is_dir():
        return place
    with locked(cache_directory() / f"jars-{name}.lock"):
        if place.is_dir():
            return place
        parts = ", ".join(" ".join(artifact.split(":")[1:3]) for artifact in artifacts)
        say(f"downloading {name} ({parts}) from Maven Central, once for all clones")
        fresh = Path(tempfile.mkdtemp(prefix=f".jars-{name}-", dir=cache_directory()))
        try:
            fetch(fresh)
            fresh.chmod(0o755)
            fresh.rename(place)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return place


def _maven(arguments: Sequence[str]) -> None:
    java()
    command = [
        program("mvn", "maven", "it fetches the jars from Maven Central"),
        "-B",
        "-q",
        "-ntp",
        "-C",  # fails if the checksum of a file is wrong. Without it Maven only warns.
        *arguments,
    ]
    done = subprocess.run(
        command,
        cwd=tempfile.gettempdir(),
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print("\n".join((done.stdout + done.stderr).splitlines()[:15]), file=sys.stderr)
        raise ServiceError(
            "Maven could not download the jars (its output is above)",
            "check the network or Maven's settings (~/.m2/settings.xml), then run this again",
        )


def _pom(artifacts: Sequence[str]) -> str:
    parts = "".join(
        "<dependency><groupId>{}</groupId><artifactId>{}</artifactId>"
        "<version>{}</version></dependency>\n".format(*artifact.split(":"))
        for artifact in artifacts
    )
    head = (
        "<modelVersion>4.0.0</modelVersion><groupId>penstock</groupId>"
        "<artifactId>servers</artifactId><version>1</version><packaging>pom</packaging>"
    )
    return (
        f'<project xmlns="http://maven.apache.org/POM/4.0.0">{head}\n'
        f"<dependencies>\n{parts}</dependencies></project>\n"
    )
