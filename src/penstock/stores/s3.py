"""Bucket of S3, or of a server with its protocol, opened from a URL. Also explains its errors.

The contents of the bucket are handled elsewhere.
"""

from __future__ import annotations

import datetime
import re
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import S3Store

from penstock.config.options import check_names, query_options
from penstock.errors import ConfigError, PenstockError, Unreachable
from penstock.rules.masking import mask

EXAMPLE = (
    "s3://bucket/prefix?region=eu-west-1, or for your own server "
    "s3://bucket/prefix?endpoint=http://localhost:9000&key=…&secret=…"
)


def error_text(e: Exception) -> str:
    """Return the server's code and message, or else the first line of the library's error."""
    text = str(e)
    found = re.search(r"<Code>(\w+)</Code><Message>([^<]*)", text)
    return f"{found[1]}: {found[2]}" if found else text.split("\n", 1)[0][:200]


BAD_CREDENTIALS = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "AuthorizationHeaderMalformed",
)


def refused(e: Exception, place: str, *, setting: str, rights: str) -> PenstockError:
    """Return the error, with a hint, to raise for an error of the S3 library.

    `setting` is the option that holds the URL, `rights` are the permissions that are needed.
    """
    text = str(e)
    if "NoSuchBucket" in text:
        return Unreachable(f"there is no {place}", hint=f"create the bucket, or correct {setting}")
    if "169.254.169.254" in text or "credential" in text.lower():
        return ConfigError(
            f"there are no credentials for {place}",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or add key= and secret= to the URL",
        )
    if any(code in text for code in BAD_CREDENTIALS):
        return Unreachable(
            f"the server of {place} does not accept these credentials ({error_text(e)})",
            hint="check key, secret and region",
        )
    if "PermanentRedirect" in text or "301 Moved" in text:
        return Unreachable(f"{place} is in another region", hint="add region= to the URL")
    if "403 Forbidden" in text or "AccessDenied" in text or "401 Unauthorized" in text:
        return Unreachable(
            f"{place} may not be used with these credentials", hint=f"allow {rights} on it"
        )
    if "error sending request" in text or "kind: Connect" in text:
        return Unreachable(
            f"the server of {place} cannot be reached",
            hint="check endpoint= and region=, and that the server runs",
        )
    return Unreachable(f"{place} cannot be used: {error_text(e)}", hint=f"check {setting}")


OPTIONS = ("endpoint", "region", "key", "secret")


def bucket_at(url: str, *, whole: bool = False) -> tuple[Any, str]:
    """Return the bucket and its name for messages. No request is sent yet.

    Keys are relative to the URL's path, or to the root of the bucket if `whole`. Raises
    ConfigError.
    """
    parts = urlsplit(url)
    options = query_options(parts.query)
    if not parts.netloc or "@" in parts.netloc:
        raise ConfigError(f"{mask(url)} names no bucket", hint=EXAMPLE)
    check_names(mask(url), options, OPTIONS)
    if bool(options.get("key")) != bool(options.get("secret")):
        raise ConfigError(
            f"{mask(url)} has half of its credentials",
            hint="give key=…&secret=…, or neither and set AWS_ACCESS_KEY_ID and so on",
        )
    endpoint = options.get("endpoint", "")
    if endpoint and not re.match(r"https?://[^/]", endpoint):
        raise ConfigError(
            f"{mask(url)}: endpoint is {endpoint!r}", hint="write it as endpoint=https://host:port"
        )
    given: dict[str, Any] = {
        "endpoint": endpoint,
        "region": options.get("region") or ("us-east-1" if endpoint else ""),
        "access_key_id": options.get("key", ""),
        "secret_access_key": options.get("secret", ""),
    }
    try:
        bucket = S3Store(
            parts.netloc,
            prefix=None if whole else parts.path.strip("/") or None,
            client_options={
                "timeout": "30s",
                "connect_timeout": "5s",
                "allow_http": endpoint.startswith("http:"),
            },
            retry_config={"max_retries": 3, "retry_timeout": datetime.timedelta(seconds=20)},
            **{name: value for name, value in given.items() if value},
        )
    except (BaseError, ValueError) as e:
        raise ConfigError(f"{mask(url)} cannot be used: {error_text(e)}", hint=EXAMPLE) from e
    return bucket, f"bucket {parts.netloc}" + (f" at {endpoint}" if endpoint else "")
