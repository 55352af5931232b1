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
from penstock.rules.masking import mask, mask_text

EXAMPLE = (
    "s3://bucket/prefix?region=eu-west-1, or for your own server "
    "s3://bucket/prefix?endpoint=http://localhost:9000&key=…&secret=…"
)


def error_text(e: Exception) -> str:
    """Return the server's code and message, or else the first line of the library's error."""
    text = mask_text(str(e))
    found = re.search(r"<Code>(\w+)</Code><Message>([^<]*)", text)
    return f"{found[1]}: {found[2]}" if found else text.split("\n", 1)[0][:200]


# Text in an error of the S3 library -> error to raise, its message and its hint.
_ERRORS: tuple[tuple[str, type[PenstockError], str, str], ...] = (
    (
        "NoSuchBucket",
        Unreachable,
        "there is no {place}",
        "create the bucket, or correct {setting}",
    ),
    (
        r"169\.254\.169\.254|(?i:credential)",
        ConfigError,
        "there are no credentials for {place}",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or add key= and secret= to the URL",
    ),
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken"
        "|AuthorizationHeaderMalformed",
        Unreachable,
        "the server of {place} does not accept these credentials ({text})",
        "check key, secret and region",
    ),
    (
        "PermanentRedirect|301 Moved",
        Unreachable,
        "{place} is in another region",
        "add region= to the URL",
    ),
    (
        "403 Forbidden|AccessDenied|401 Unauthorized",
        Unreachable,
        "{place} may not be used with these credentials",
        "allow {rights} on it",
    ),
    (
        "error sending request|kind: Connect",
        Unreachable,
        "the server of {place} cannot be reached",
        "check endpoint= and region=, and that the server runs",
    ),
    ("", Unreachable, "{place} cannot be used: {text}", "check {setting}"),
)


def refused(e: Exception, place: str, *, setting: str, rights: str) -> PenstockError:
    """Return the error, with a hint, to raise for an error of the S3 library.

    `setting` is the option that holds the URL, `rights` are the permissions that are needed.
    """
    facts = {"place": place, "setting": setting, "rights": rights, "text": error_text(e)}
    kind, message, hint = next((k, m, h) for text, k, m, h in _ERRORS if re.search(text, str(e)))
    return kind(message.format(**facts), hint=hint.format(**facts))


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
            f"{mask(url)}: endpoint is {mask(endpoint)!r}",
            hint="write it as endpoint=https://host:port",
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
    return bucket, f"bucket {parts.netloc}" + (f" at {mask(endpoint)}" if endpoint else "")
