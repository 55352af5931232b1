"""What SQS is told and what it tells: its DSN, names of queues, messages as text, and its errors in
our words. No connection is kept here.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import json
import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

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

from penstock.errors import ConfigError, PenstockError, StoreUnavailable, Unreachable
from penstock.ports import Out
from penstock.rules.masking import mask

CLASSES = ("high", "normal", "low")
NORMAL = 1
DEAD = ".dead"
NOTE = "penstock"  # the one message attribute that is ours
LEAST_LIMIT = (
    256 << 10
)  # bytes of a message or a batch that every server takes; where a queue says more, more is used
SQUEEZE = 32 << 10  # larger bodies are compressed
EXPANDED = 64 << 20  # and none is larger than that
EXAMPLE = "sqs://?region=eu-west-1, or sqs://key:secret@localhost:9324/?tls=false for a server of your own"


# -- the DSN ---------------------------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the queues are, and how we ask for them."""

    endpoint: str | None  # None: AWS
    region: str | None
    key: str | None
    secret: str | None
    prefix: str
    poll: int  # seconds of a long poll
    receives: int  # after so many SQS itself gives a message up; 0: never

    @property
    def shown(self) -> str:
        return (
            f"SQS at {self.endpoint}"
            if self.endpoint
            else f"SQS in {self.region}"
            if self.region
            else "SQS"
        )


_OPTIONS = ("region", "tls", "poll", "max_receives")


def parse(url: str, namespace: str) -> Place:
    """Raises ConfigError; shows no secret."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise ConfigError(
            f"{mask(url)} is no SQS URL: {e}",
            hint=f"{EXAMPLE}; write / + @ : in a secret as %2F %2B %40 %3A",
        ) from e
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, 1)
            raise ConfigError(
                f"{mask(url)}: {name!r} is no option of an SQS URL",
                hint=f"did you mean {near[0]}?" if near else "options: " + ", ".join(_OPTIONS),
            )
    if bool(parts.username) != bool(parts.password):
        raise ConfigError(
            f"{mask(url)} has half of its credentials",
            hint="sqs://key:secret@…, or neither for the usual AWS credentials",
        )
    tls = options.get("tls", "true")
    if tls not in ("true", "false"):
        raise ConfigError(f"{mask(url)}: tls is {tls!r}", hint="tls=true or tls=false")
    name = parts.path.strip("/") or namespace or "penstock"
    own = f"[{host}]" if host and ":" in host else host
    return Place(
        endpoint=None
        if own is None
        else f"{'https' if tls == 'true' else 'http'}://{own}{f':{port}' if port else ''}",
        region=options.get("region") or ("elasticmq" if own else None),
        key=unquote(parts.username) if parts.username else None,
        secret=unquote(parts.password) if parts.password else None,
        prefix=re.sub(r"[^A-Za-z0-9_-]", "-", name) if len(name) <= 24 else _short(name, 24),
        poll=_number(url, options, "poll", 2, 1, 20),  # also how long a worker takes to leave
        receives=_number(url, options, "max_receives", 1000, 0, 1000),
    )


def _number(url: str, options: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    text = options.get(name, str(default))
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise ConfigError(
            f"{mask(url)}: {name} is {text!r}", hint=f"a whole number from {low} to {high}"
        )
    return int(text)


# -- names -----------------------------------------------------------------------------------------


class Where(msgspec.Struct, frozen=True):
    """One queue: SQS has no groups and no priorities, so each class of each group has its own."""

    topic: str
    group: str
    rank: int


def lanes(topic: str, group: str) -> list[Where]:
    """The queues of a group, most urgent first. Dead letters are all alike."""
    return (
        [Where(topic, group, NORMAL)]
        if topic.endswith(DEAD)
        else [Where(topic, group, rank) for rank in range(len(CLASSES))]
    )


def dead_queue(topic: str) -> Where:
    return Where(topic.removesuffix(DEAD) + DEAD, "main", NORMAL)


def queue_name(prefix: str, where: Where) -> str:
    """`shop-requests-main`, `shop-requests-main-high`: at most 80 of the characters SQS takes, and
    never the same for two.
    """
    return (
        topic_prefix(prefix, where.topic)
        + group_name(where.group)
        + ("" if where.rank == NORMAL else "-" + CLASSES[where.rank])
    )


def topic_prefix(prefix: str, topic: str) -> str:
    base = topic.removesuffix(DEAD)
    return f"{prefix}-{_part(base, 20)}{'_dead' if base != topic else ''}-"


def group_name(group: str) -> str:
    """As SQS spells it; spelled again it stays the same."""
    return _part(group, 20)


def groups_of(names: list[str], start: str) -> set[str]:
    """Which groups queues of these names belong to; what only begins alike does not count."""
    found = set()
    for name in names:
        group, _, rank = name.removeprefix(start).partition("-")
        if name.startswith(start) and group and rank in ("", *CLASSES):
            found.add(group)
    return found


def _part(text: str, most: int) -> str:
    """`-` stays free to separate parts."""
    return (
        text if re.fullmatch(rf"[A-Za-z0-9_]{{1,{most}}}(?<!_dead)", text) else _short(text, most)
    )


def _short(text: str, most: int) -> str:
    return (
        re.sub(r"[^A-Za-z0-9]", "_", text)[: most - 7]
        + "_"
        + hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
    )


# -- messages --------------------------------------------------------------------------------------


class Note(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a message is, apart from its body; travels in an attribute, so that a body which is text
    stays readable.
    """

    id: str
    key: str = ""
    prio: int = NORMAL
    seq: int = 0  # when it was published, ns: SQS keeps no order, this restores some of it
    after: float = 0.0  # not to be handed out before
    code: str = ""  # of the body: text, b (base64) or z (base64 of zstd)
    headers: dict[str, str] = {}


class Parcel(msgspec.Struct):
    body: str
    note: str
    size: int  # as SQS counts it
    group: str  # on AWS, keys with much work then keep others waiting less


_UNSAFE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_GROUP = re.compile(r"[!-~]{1,128}")
_squeeze = zstandard.ZstdCompressor(level=3)
_expand = zstandard.ZstdDecompressor()
_note = msgspec.json.Decoder(Note).decode
_write = msgspec.json.Encoder().encode


def pack(m: Out, seq: int, after: float) -> Parcel:
    text, code = _text(m.body)
    note = _write(
        Note(
            id=m.id, key=m.key, prio=m.priority, seq=seq, after=after, code=code, headers=m.headers
        )
    ).decode()
    if _UNSAFE.search(note):
        note = json.dumps(
            json.loads(note)
        )  # escaped: a few characters of Unicode are no text for SQS
    size = (
        len(text if text.isascii() else text.encode())
        + len(note.encode())
        + len(NOTE)
        + len("String")
    )
    return Parcel(text, note, size, m.key if _GROUP.fullmatch(m.key) else "")


def _text(body: bytes) -> tuple[str, str]:
    if len(body) > SQUEEZE:
        packed = _squeeze.compress(body)
        if len(packed) < 0.7 * len(body):  # base64 takes a third
            return base64.b64encode(packed).decode(), "z"
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or _UNSAFE.search(text):
        return base64.b64encode(body).decode() or "=", "b"  # SQS refuses an empty one
    return text, ""


def unpack(message: dict[str, Any]) -> tuple[Note, bytes]:
    """Never raises: what is not ours is handed out as it is, and whoever reads it finds that it is
    no envelope.
    """
    text: str = message.get("Body", "")
    try:
        note = _note(message["MessageAttributes"][NOTE]["StringValue"])
        return note, _bytes(text, note.code)
    except (
        KeyError,
        msgspec.MsgspecError,
        UnicodeError,
        binascii.Error,
        zstandard.ZstdError,
        ValueError,
    ):
        return Note(id=message["MessageId"]), text.encode("utf-8", "surrogatepass")


def _bytes(text: str, code: str) -> bytes:
    if code == "b":
        return b"" if text == "=" else base64.b64decode(text, validate=True)
    if code == "z":
        return _expand.decompress(base64.b64decode(text, validate=True), max_output_size=EXPANDED)
    return text.encode()


def position(message_id: str) -> int:
    """SQS has no positions; its ids are unique, and so are 63 bits of them."""
    return int.from_bytes(hashlib.blake2b(message_id.encode(), digest_size=8).digest(), "big") >> 1


# -- errors ----------------------------------------------------------------------------------------

_GONE = ("NonExistentQueue", "QueueDoesNotExist")
_REFUSED = (
    "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch", "InvalidSignatureException", "InvalidAccessKeyId",
    "IncompleteSignature", "MissingAuthenticationToken", "InvalidSecurity", "AuthFailure",
)  # fmt: skip
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")
_DENIED = (
    "AccessDenied",
    "AccessDeniedException",
    "AuthorizationError",
    "NotAuthorized",
    "KmsAccessDenied",
)
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


class Gone(StoreUnavailable):
    """The queue is not there: never made, removed, or forgotten by a server that keeps nothing."""


class NotSent(StoreUnavailable):
    """There was nobody to send it to, so nothing can have happened."""


class Rejected(StoreUnavailable):
    """The server understood and declined: asking again in the same way is of no use."""


def code_of(e: ClientError) -> str:
    """Without the service's name, which some servers and older protocols put before it."""
    error = e.response.get("Error", {})
    named = re.search(
        r"<Code>(\w+)</Code>", str(error.get("Message", ""))
    )  # the answer of an older protocol, taken for a text
    return named[1] if named else str(error.get("Code", "")).rpartition(".")[2]


def stale(failed: dict[str, Any]) -> bool:
    """Is this entry of a batch refused for good (the receipt is another's, or the message is gone),
    or may it be tried again?
    """
    return (
        bool(failed.get("SenderFault")) or str(failed.get("Code", "")).rpartition(".")[2] in _STALE
    )


def outage(e: Exception, place: Place) -> StoreUnavailable:
    """While running: whoever is told waits and tries again."""
    if isinstance(e, ClientError):
        code, status = code_of(e), e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        said = f"{place.shown} answers {e.operation_name} with {code or status}: {e.response.get('Error', {}).get('Message', '')}"
        if code in _GONE:
            return Gone(said)
        return StoreUnavailable(said) if status >= 500 or code in _BUSY else Rejected(said)
    # Nobody to connect to proves nothing: this may be the client's third try, and its first may
    # have arrived.
    kind = NotSent if isinstance(e, NoCredentialsError) else StoreUnavailable
    return kind(f"{place.shown} cannot be reached: {e}")


def at_start(e: Exception, place: Place) -> PenstockError:
    """The first contact: one sentence each, and what to do about it."""
    cause = e.__cause__ if isinstance(e, StoreUnavailable) and e.__cause__ is not None else e
    match cause:
        case NoCredentialsError() | PartialCredentialsError():
            return ConfigError(
                "there are no AWS credentials for SQS",
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
                f"the certificate of {place.shown} is not trusted here",
                hint="set AWS_CA_BUNDLE to a file with its certificate authority",
            )
        case SSLError():
            return Unreachable(
                f"{place.shown} does not answer with TLS",
                hint="add tls=false to the URL if it speaks plain HTTP",
            )
        case ClientError():
            return _refusal(cause, place)
        case EndpointConnectionError() | ConnectTimeoutError():
            return Unreachable(
                f"{place.shown} cannot be reached",
                hint="check host and port, and that it runs; for AWS, check region and network",
            )
        case BotoCoreError() | StoreUnavailable():
            return Unreachable(
                f"{place.shown} does not answer as SQS does",
                hint="check host, port and tls=; the server's log may tell more",
            )
    return Unreachable(
        f"{place.shown} cannot be used: {cause}", hint="check host and port, and that it runs"
    )


def _refusal(e: ClientError, place: Place) -> PenstockError:
    code = code_of(e)
    if code in _REFUSED:
        return Unreachable(
            f"{place.shown} does not know these credentials ({code})",
            hint="check key and secret, in the URL or in AWS_ACCESS_KEY_ID and so on",
        )
    if code in _EXPIRED:
        return Unreachable(
            f"{place.shown} says that the credentials have expired",
            hint="log in again (aws sso login), or renew AWS_SESSION_TOKEN",
        )
    if code in _DENIED:
        actions = (
            "sqs:GetQueueUrl, CreateQueue, ListQueues, GetQueueAttributes, SendMessage, "
            "ReceiveMessage, ChangeMessageVisibility, DeleteMessage, PurgeQueue"
        )
        return Unreachable(
            f"{place.shown} does not allow sqs:{e.operation_name}",
            hint=f"allow {actions} on {place.prefix}-*",
        )
    if code in (
        "",
        "404",
        "NotFound",
        "Not Found",
        "400",
        "InvalidAction",
        "UnknownOperationException",
    ):
        return Unreachable(
            f"{place.shown} does not answer as SQS does ({code or 'no error code'})",
            hint="check host, port and tls=",
        )
    return Unreachable(
        f"{place.shown} answers {e.operation_name} with {code}: {e.response['Error'].get('Message', '')}",
        hint="check the URL of the broker",
    )
