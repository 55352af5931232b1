"""SQS formats: the URL, queue names, messages as text, and explanations of errors.

Opens no connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import zstandard
from botocore.exceptions import (  # type: ignore[import-untyped, unused-ignore]
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)

from penstock.brokers.dead_copies import DEAD
from penstock.config import units
from penstock.config.options import query_options, read_options
from penstock.errors import ConfigError, PenstockError, StoreUnavailable, Unreachable
from penstock.ports import Out
from penstock.rules.masking import mask
from penstock.rules.priority import CLASSES, NORMAL

ATTRIBUTE = "penstock"  # name of Penstock's message attribute
# Bytes of a message or a batch that every server accepts. A queue may have a higher limit.
MIN_SIZE_LIMIT = 256 << 10
COMPRESS_ABOVE = 32 << 10  # bytes. Larger bodies are compressed.
MAX_BODY = 64 << 20  # bytes of a decompressed body
EXAMPLE = (
    "sqs://?region=eu-west-1, or sqs://key:secret@localhost:9324/?tls=false for another server"
)


# -- the URL ---------------------------------------------------------------------------------------


class SqsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed and checked URL."""

    endpoint: str | None  # None for AWS
    region: str | None
    key: str | None
    secret: str | None
    prefix: str
    poll: int  # seconds of a long poll
    # receives after which SQS moves a message to the dead-letter queue, or 0 for never
    receives: int

    @property
    def shown(self) -> str:
        return (
            f"SQS at {self.endpoint}"
            if self.endpoint
            else f"SQS in {self.region}"
            if self.region
            else "SQS"
        )


OPTIONS = {
    "region": units.texts(".*", "the name of a region"),
    "tls": units.choices("true", "false"),
    # A worker that ends waits for its polls, so this is also a part of its shutdown time.
    "poll": units.counts(1, 20),
    "max_receives": units.counts(0, 1000),
}


def parse(url: str, namespace: str) -> SqsAddress:
    """Parse a URL. Raises ConfigError, which never shows the secret."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # the text of the error may contain a part of the secret
        raise ConfigError(
            f"{mask(url)} is not an SQS URL",
            hint=f"{EXAMPLE}. Write / + @ : in a secret as %2F %2B %40 %3A",
        ) from None
    options = read_options(mask(url), query_options(parts.query), OPTIONS)
    if bool(parts.username) != bool(parts.password):
        raise ConfigError(
            f"{mask(url)} has half of its credentials",
            hint="sqs://key:secret@…, or neither for the usual AWS credentials",
        )
    web_scheme = "http" if options.get("tls") == "false" else "https"
    name = parts.path.strip("/") or namespace or "penstock"
    own = f"[{host}]" if host and ":" in host else host
    return SqsAddress(
        endpoint=f"{web_scheme}://{own}{f':{port}' if port else ''}" if own else None,
        region=options.get("region") or ("elasticmq" if own else None),
        key=unquote(parts.username) if parts.username else None,
        secret=unquote(parts.password) if parts.password else None,
        prefix=re.sub(r"[^A-Za-z0-9_-]", "-", name) if len(name) <= 24 else _shorten(name, 24),
        poll=options.get("poll", 2),
        receives=options.get("max_receives", 1000),
    )


# -- names -----------------------------------------------------------------------------------------


class QueueId(msgspec.Struct, frozen=True):
    """One queue. SQS has no groups and no priorities, so each class of each group has a queue."""

    topic: str
    group: str
    priority: int


def group_queues(topic: str, group: str) -> list[QueueId]:
    """Return the queues of a group, most urgent first. Dead letters have one priority class."""
    return (
        [QueueId(topic, group, NORMAL)]
        if topic.endswith(DEAD)
        else [QueueId(topic, group, priority) for priority in range(len(CLASSES))]
    )


def dead_queue(topic: str) -> QueueId:
    return QueueId(topic.removesuffix(DEAD) + DEAD, "main", NORMAL)


def queue_name(prefix: str, queue: QueueId) -> str:
    """Return a unique queue name of at most 80 characters, all of which SQS allows.

    Examples: `shop-requests-main`, `shop-requests-main-high`.
    """
    return (
        topic_prefix(prefix, queue.topic)
        + group_name(queue.group)
        + ("" if queue.priority == NORMAL else "-" + CLASSES[queue.priority])
    )


def topic_prefix(prefix: str, topic: str) -> str:
    base = topic.removesuffix(DEAD)
    return f"{prefix}-{_part(base, 20)}{'_dead' if base != topic else ''}-"


def group_name(group: str) -> str:
    """Return the group's name in queue names. Applied again, it returns the same name."""
    return _part(group, 20)


def groups_of(names: list[str], start: str) -> set[str]:
    """Return the groups of the queues with these names. Ignore names of another form."""
    parts = [name.removeprefix(start).partition("-") for name in names if name.startswith(start)]
    return {group for group, _, priority in parts if group and priority in ("", *CLASSES)}


def _part(text: str, limit: int) -> str:
    """Return `text` without `-`, which separates the parts of a queue name."""
    return (
        text
        if re.fullmatch(rf"[A-Za-z0-9_]{{1,{limit}}}(?<!_dead)", text)
        else _shorten(text, limit)
    )


def _shorten(text: str, limit: int) -> str:
    return (
        re.sub(r"[^A-Za-z0-9]", "_", text)[: limit - 7]
        + "_"
        + hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
    )


# -- messages --------------------------------------------------------------------------------------


class Attributes(msgspec.Struct, omit_defaults=True, kw_only=True):
    """All properties of a message except its body.

    They are sent in a message attribute, so that a text body stays readable.
    """

    id: str
    key: str = ""
    prio: int = NORMAL
    seq: int = 0  # publishing time in ns, used to sort messages because SQS keeps no order
    after: float = 0.0  # not delivered before this time
    code: str = ""  # encoding of the body: "" (text), b (base64) or z (base64 of zstd)
    headers: dict[str, str] = {}


class PackedMessage(msgspec.Struct):
    """A message in the format of SQS."""

    body: str
    attributes: str
    size: int  # bytes, as SQS counts them
    group: str  # message group for AWS fair queues: keys with many messages delay others less


_UNSAFE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_GROUP = re.compile(r"[!-~]{1,128}")
_compressor = zstandard.ZstdCompressor(level=3)
_decompressor = zstandard.ZstdDecompressor()
_decode_attributes = msgspec.json.Decoder(Attributes).decode
_encode_json = msgspec.json.Encoder().encode


def pack(m: Out, seq: int, after: float) -> PackedMessage:
    text, code = _text(m.body)
    attributes = _encode_json(
        Attributes(
            id=m.id, key=m.key, prio=m.priority, seq=seq, after=after, code=code, headers=m.headers
        )
    ).decode()
    if _UNSAFE.search(attributes):
        # Escape all characters outside ASCII, because SQS does not accept some of them.
        attributes = json.dumps(json.loads(attributes))
    size = (
        len(text if text.isascii() else text.encode())
        + len(attributes.encode())
        + len(ATTRIBUTE)
        + len("String")
    )
    return PackedMessage(text, attributes, size, m.key if _GROUP.fullmatch(m.key) else "")


def _text(body: bytes) -> tuple[str, str]:
    if len(body) > COMPRESS_ABOVE:
        packed = _compressor.compress(body)
        if len(packed) < 0.7 * len(body):  # base64 adds a third
            return base64.b64encode(packed).decode(), "z"
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or _UNSAFE.search(text):
        return base64.b64encode(body).decode() or "=", "b"  # SQS refuses an empty body
    return text, ""


def unpack(message: dict[str, Any]) -> tuple[Attributes, bytes]:
    """Decode a message. Never raises.

    The body of another program's message is returned unchanged. The worker then finds that it is
    not an envelope.
    """
    text: str = message.get("Body", "")
    try:
        attributes = _decode_attributes(message["MessageAttributes"][ATTRIBUTE]["StringValue"])
        return attributes, _bytes(text, attributes.code)
    except (KeyError, ValueError, msgspec.MsgspecError, zstandard.ZstdError):
        return Attributes(id=message["MessageId"]), text.encode("utf-8", "surrogatepass")


def _bytes(text: str, code: str) -> bytes:
    if code == "b":
        return b"" if text == "=" else base64.b64decode(text, validate=True)
    if code == "z":
        return _decompressor.decompress(
            base64.b64decode(text, validate=True), max_output_size=MAX_BODY
        )
    return text.encode()


def position(message_id: str) -> int:
    """Return 63 bits of a hash of the id. SQS has no positions, but its ids are unique."""
    return int.from_bytes(hashlib.blake2b(message_id.encode(), digest_size=8).digest(), "big") >> 1


# -- errors ----------------------------------------------------------------------------------------

_MISSING = ("NonExistentQueue", "QueueDoesNotExist")
_BUSY = (
    "Throttling",
    "ThrottlingException",
    "RequestThrottled",
    "OverLimit",
    "TooManyRequestsException",
)
_STALE = (
    "ReceiptHandleIsInvalid",
    "InvalidParameterValue",
    "MessageNotInflight",
    "InvalidParameterValueException",
)


class QueueMissing(StoreUnavailable):
    """The queue does not exist: never created, deleted, or lost by a server without storage."""


class NotSent(StoreUnavailable):
    """The request was certainly not sent."""


class Rejected(StoreUnavailable):
    """The server refused the request. Repeating the same request cannot succeed."""


def code_of(e: ClientError) -> str:
    """Return the error code without the service name that some servers put before it."""
    error = e.response.get("Error", {})
    # The client took an XML answer of the older protocol for a text.
    named = re.search(r"<Code>(\w+)</Code>", str(error.get("Message", "")))
    return named[1] if named else str(error.get("Code", "")).rpartition(".")[2]


def is_permanent(failed: dict[str, Any]) -> bool:
    """Return True if SQS refused this entry of a batch permanently, False if it may be retried.

    SQS refuses an entry permanently if the receipt handle is outdated or the message is deleted.
    """
    return (
        bool(failed.get("SenderFault")) or str(failed.get("Code", "")).rpartition(".")[2] in _STALE
    )


def outage(e: Exception, address: SqsAddress) -> StoreUnavailable:
    """Return the error of a request at run time. The caller waits and retries."""
    if isinstance(e, ClientError):
        code, status = code_of(e), e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        text = (
            f"{address.shown} answers {e.operation_name} with {code or status}:"
            f" {e.response.get('Error', {}).get('Message', '')}"
        )
        if code in _MISSING:
            return QueueMissing(text)
        return StoreUnavailable(text) if status >= 500 or code in _BUSY else Rejected(text)
    # A failed connection does not prove that the request was not sent. It may be the client's third
    # attempt, and the first attempt may have arrived.
    kind = NotSent if isinstance(e, NoCredentialsError) else StoreUnavailable
    return kind(f"{address.shown} cannot be reached: {e}")


def start_error(e: Exception, address: SqsAddress) -> PenstockError:
    """Return the error of the first request, with an explanation and a next step."""
    cause = e.__cause__ if isinstance(e, StoreUnavailable) and e.__cause__ is not None else e
    match cause:
        case NoCredentialsError() | PartialCredentialsError():
            return ConfigError(
                "found no AWS credentials for SQS",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write sqs://key:secret@…",
            )
        case NoRegionError() | InvalidRegionError():
            return ConfigError(
                f"{cause}" if isinstance(cause, InvalidRegionError) else "SQS needs a region",
                hint="sqs://?region=eu-west-1, or set AWS_REGION",
            )
        case ProfileNotFound():
            return ConfigError(
                f"{cause}", hint="set AWS_PROFILE to one of `aws configure list-profiles`"
            )
        case SSLError() if "CERTIFICATE_VERIFY_FAILED" in str(cause):
            return Unreachable(
                f"the certificate of {address.shown} is not trusted here",
                hint="set AWS_CA_BUNDLE to a file with the CA of the certificate",
            )
        case SSLError():
            return Unreachable(
                f"{address.shown} does not answer with TLS",
                hint="add tls=false to the URL if the server uses plain HTTP",
            )
        case ClientError():
            return _explain(cause, address)
        case EndpointConnectionError() | ConnectTimeoutError():
            return Unreachable(
                f"{address.shown} cannot be reached",
                hint="check host and port, and that the server runs."
                " For AWS, check region and network",
            )
        case BotoCoreError() | StoreUnavailable():
            return Unreachable(
                f"{address.shown} does not answer as SQS does",
                hint="check host, port and tls=, and read the server's log",
            )
    return Unreachable(
        f"{address.shown} cannot be used: {cause}",
        hint="check host and port, and that the server runs",
    )


def _explain(e: ClientError, address: SqsAddress) -> PenstockError:
    match code := code_of(e):
        case (
            "InvalidClientTokenId"
            | "UnrecognizedClientException"
            | "SignatureDoesNotMatch"
            | "InvalidSignatureException"
            | "InvalidAccessKeyId"
            | "IncompleteSignature"
            | "MissingAuthenticationToken"
            | "InvalidSecurity"
            | "AuthFailure"
        ):
            return Unreachable(
                f"{address.shown} does not know these credentials ({code})",
                hint="check key and secret in the URL,"
                " or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        case "ExpiredToken" | "ExpiredTokenException" | "RequestExpired":
            return Unreachable(
                f"{address.shown} reports that the credentials have expired",
                hint="log in again (aws sso login), or renew AWS_SESSION_TOKEN",
            )
        case (
            "AccessDenied"
            | "AccessDeniedException"
            | "AuthorizationError"
            | "NotAuthorized"
            | "KmsAccessDenied"
        ):
            return Unreachable(
                f"{address.shown} does not allow sqs:{e.operation_name}",
                hint="allow sqs:GetQueueUrl, CreateQueue, ListQueues, GetQueueAttributes,"
                " SendMessage, ReceiveMessage, ChangeMessageVisibility, DeleteMessage, PurgeQueue"
                f" on {address.prefix}-*",
            )
        case (
            ""
            | "404"
            | "NotFound"
            | "Not Found"
            | "400"
            | "InvalidAction"
            | "UnknownOperationException"
        ):
            return Unreachable(
                f"{address.shown} does not answer as SQS does ({code or 'no error code'})",
                hint="check host, port and tls=",
            )
    return Unreachable(
        f"{address.shown} answers {e.operation_name} with {code}:"
        f" {e.response['Error'].get('Message', '')}",
        hint="check the URL of the broker",
    )
