"""Where seed lists lie on S3: the objects under a prefix, and how their bytes are read. Loaded only
by sources that name a bucket.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, PreconditionError

from penstock.errors import SourceDown
from penstock.sources.seeds.files import MOST, Changed, Found, Opened, Unread, passed_over, stamp
from penstock.sources.seeds.formats import format_of
from penstock.stores.s3 import bucket_at, refused

RIGHTS = "s3:ListBucket and s3:GetObject"


class Bucket:
    """An object never changes under its ETag, so a request for a part of it says which one is
    meant.
    """

    def __init__(self, url: str, *, any_name: bool) -> None:
        """Raises ConfigError."""
        self._bucket, self.place = bucket_at(url, whole=True)
        parts = urlsplit(url)
        self._prefix, self._any_name = unquote(parts.path).lstrip("/"), any_name
        self.identity = f"{self.place.removeprefix('bucket ')}/{self._prefix}"
        self.is_directory = self._prefix.endswith("/") or not format_of(self._prefix)

    def scan(self) -> tuple[list[Found], list[Unread]]:
        folder, cut = self._prefix.rpartition("/")[0], self._prefix.rfind("/") + 1
        found: list[Found] = []
        try:
            for some in obstore.list(
                self._bucket, folder or None, offset=self._prefix[:-1] or None, chunk_size=1000
            ):
                for meta in some:
                    path = meta["path"]
                    if path.startswith(self._prefix) and self._wanted(
                        path[cut:], named=path == self._prefix
                    ):
                        found.append(_found(path[cut:], meta))
                    if len(found) > MOST:
                        raise SourceDown(
                            f"there are more than {MOST} objects under {self.identity}",
                            hint="name a longer prefix, or several sources",
                        )
                if (
                    some
                    and some[-1]["path"] > self._prefix
                    and not some[-1]["path"].startswith(self._prefix)
                ):
                    break  # they come in order
        except (BaseError, OSError, ValueError) as e:
            raise self._refused(e) from e
        return sorted(found, key=lambda f: f.name), []

    def _wanted(self, name: str, *, named: bool) -> bool:
        return named or (not passed_over(name) and (self._any_name or format_of(name) is not None))

    def _refused(self, e: Exception) -> SourceDown:
        trouble = refused(e, self.place, setting="the URL of the source", rights=RIGHTS)
        return SourceDown(trouble.message, hint=trouble.hint)

    def open(self, found: Found) -> Opened:
        return Object(self, found)

    def part(self, found: Found, offset: int, length: int) -> bytes:
        asked: Any = {
            "range": (offset, min(offset + length, found.size)),
            "if_match": found.version,
        }
        try:
            return bytes(obstore.get(self._bucket, found.path, options=asked).bytes())
        except (PreconditionError, FileNotFoundError) as e:
            if "NoSuchBucket" in str(e):
                raise self._refused(e) from e
            raise Changed from None
        except (BaseError, OSError, ValueError) as e:
            if "AccessDenied" in str(e) or "403 Forbidden" in str(e):
                raise Unread(
                    f"{found.path} in {self.place} may not be read", hint="allow s3:GetObject on it"
                ) from e
            raise self._refused(e) from e  # the others would only wait for the same server


class Object:
    def __init__(self, bucket: Bucket, found: Found) -> None:
        self._bucket, self.found = bucket, found

    def read_at(self, offset: int, length: int) -> bytes:
        return self._bucket.part(self.found, offset, length) if offset < self.found.size else b""

    def close(self) -> None:
        return None


def _found(name: str, meta: Any) -> Found:
    version = meta["e_tag"] or f"{meta['last_modified'].isoformat()} {meta['size']}"
    return Found(
        name=name,
        path=meta["path"],
        stamp=stamp(version),
        size=meta["size"],
        at=meta["last_modified"].timestamp(),
        version=version,
    )
