"""Seed lists on S3: lists and reads the objects under a prefix.

This module is imported only if a source names a bucket.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, PreconditionError

from penstock.errors import SourceDown
from penstock.sources.seeds.files import (
    MAX_OBJECTS,
    ObjectChanged,
    ObjectUnreadable,
    OpenObject,
    SeedObject,
    format_of,
    is_wanted,
    stamp,
)
from penstock.stores.s3 import bucket_at, refused

RIGHTS = "s3:ListBucket and s3:GetObject"


class Bucket:
    """Objects under a prefix of a bucket.

    Each request for a part of an object has the ETag, so all parts belong to the same version.
    """

    def __init__(self, url: str, *, any_name: bool) -> None:
        """Parse the URL of the source. Raises ConfigError."""
        self._bucket, self.place = bucket_at(url, whole=True)
        parts = urlsplit(url)
        self._prefix, self._any_name = unquote(parts.path).lstrip("/"), any_name
        self.identity = f"{self.place.removeprefix('bucket ')}/{self._prefix}"
        self.is_directory = self._prefix.endswith("/") or not format_of(self._prefix)

    def scan(self) -> tuple[list[SeedObject], list[ObjectUnreadable]]:
        folder, cut = self._prefix.rpartition("/")[0], self._prefix.rfind("/") + 1
        found: list[SeedObject] = []
        try:
            for page in obstore.list(
                self._bucket, folder or None, offset=self._prefix[:-1] or None, chunk_size=1000
            ):
                for meta in page:
                    path, name = meta["path"], meta["path"][cut:]
                    if path == self._prefix or (
                        path.startswith(self._prefix) and is_wanted(name, any_name=self._any_name)
                    ):
                        found.append(_found(name, meta))
                    if len(found) > MAX_OBJECTS:
                        raise SourceDown(
                            f"there are more than {MAX_OBJECTS} objects under {self.identity}",
                            hint="use a longer prefix, or several sources",
                        )
                if (
                    page
                    and page[-1]["path"] > self._prefix
                    and not page[-1]["path"].startswith(self._prefix)
                ):
                    break  # objects are listed in order, so no object with the prefix follows
        except (BaseError, OSError, ValueError) as e:
            raise self._error(e) from e
        return sorted(found, key=lambda f: f.name), []

    def _error(self, e: Exception) -> SourceDown:
        error = refused(e, self.place, setting="the URL of the source", rights=RIGHTS)
        return SourceDown(error.message, hint=error.hint)

    def open(self, found: SeedObject) -> OpenObject:
        return S3Object(self, found)

    def part(self, found: SeedObject, offset: int, length: int) -> bytes:
        options: Any = {
            "range": (offset, min(offset + length, found.size)),
            "if_match": found.version,
        }
        try:
            return bytes(obstore.get(self._bucket, found.path, options=options).bytes())
        except (PreconditionError, FileNotFoundError) as e:
            if "NoSuchBucket" in str(e):
                raise self._error(e) from e
            raise ObjectChanged from None
        except (BaseError, OSError, ValueError) as e:
            if "AccessDenied" in str(e) or "403 Forbidden" in str(e):
                raise ObjectUnreadable(
                    f"{found.path} in {self.place} may not be read", hint="allow s3:GetObject on it"
                ) from e
            # The server itself fails, so the other objects are not tried.
            raise self._error(e) from e


class S3Object:
    def __init__(self, bucket: Bucket, found: SeedObject) -> None:
        self._bucket, self.found = bucket, found

    def read_at(self, offset: int, length: int) -> bytes:
        return self._bucket.part(self.found, offset, length) if offset < self.found.size else b""

    def close(self) -> None:
        return None


def _found(name: str, meta: Any) -> SeedObject:
    version = meta["e_tag"] or f"{meta['last_modified'].isoformat()} {meta['size']}"
    return SeedObject(
        name=name,
        path=meta["path"],
        stamp=stamp(version),
        size=meta["size"],
        at=meta["last_modified"].timestamp(),
        version=version,
    )
