"""Bytes that claim to be XML, made safe before any parser sees them: one decoding, no DTD, caps;
and the dates they hold. Knows no feed and no sitemap.
"""

from __future__ import annotations

import codecs
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from html.entities import html5

from penstock.net.decoding import BrokenCoding, DecodedTooLarge, Decoder

MAX_MENDED = 200_000  # ampersands that are looked at in an ill-formed document
MAX_TAGS = (
    500_000  # a tree takes a hundred bytes for each; an honest document of this size does not exist
)
_LAYERS = 2  # of gzip: some servers compress what is compressed
_HEAD = 1024

_BOMS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_SHAPES = (
    (b"<\0\0\0", "utf-32-le"),
    (b"\0\0\0<", "utf-32-be"),
    (b"<\0", "utf-16-le"),
    (b"\0<", "utf-16-be"),
)
# Not utf-7, ebcdic and whatever else Python can decode: nobody publishes in it, but it hides markup
# from whoever looks at bytes.
_KNOWN = re.compile(r"utf-8|ascii|utf-16(-[lb]e)?|utf-32(-[lb]e)?|iso8859-\d+|cp125\d|cp866|cp874|cp932|cp949|koi8-[rtu]|gb2312|gbk|gb18030|big5(hkscs)?|"
                    r"euc_jp|euc_kr|shift_jis|iso2022_jp\w*|mac-roman|mac-cyrillic|tis-620")  # fmt: skip
_charset = re.compile(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.I).search
_declared = re.compile(
    rb"<\?xml[^>]{0,200}?encoding\s{0,9}=\s{0,9}[\"']([\w.:-]{1,40})[\"']", re.I
).search
_unprintable = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_special = re.compile(r"<\?|<!(?:\[CDATA\[|--|[A-Za-z\[%]|\s)")
_ENDS = {"<![CDATA[": "]]>", "<!--": "-->", "<?": "?>"}


_entity = re.compile(
    r"&(?!(?:amp|lt|gt|quot|apos|#\d{1,7}|#x[0-9a-fA-F]{1,6});)(?:([A-Za-z][A-Za-z0-9]{1,31});)?"
)


class Unreadable(Exception):
    """No document that we read; the reason finishes the sentence "it …"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def unpacked(body: bytes, limit: int) -> bytes:
    """The same without gzip, if it is that by its first bytes (whatever its name and type say).
    Raises Unreadable.
    """
    for _ in range(_LAYERS):
        if body[:2] != b"\x1f\x8b":
            break
        decoder = Decoder(("gzip",), limit)
        try:
            decoder.feed(body)
            body = decoder.finish()
        except DecodedTooLarge:
            raise Unreadable(f"has more than {limit} bytes when it is unpacked") from None
        except BrokenCoding as e:
            raise Unreadable(f"is broken gzip: {e}") from None
    if body[:2] == b"\x1f\x8b":
        raise Unreadable(f"is packed more than {_LAYERS} times")
    if len(body) > limit:
        raise Unreadable(f"has {len(body)} bytes, of at most {limit}")
    return body


def encoding_of(body: bytes, content_type: str | None) -> str:
    """A byte order mark, UTF-16 and UTF-32 by their shape; else what is valid UTF-8 is UTF-8,
    whatever it claims; else its claim; else Windows-1252.
    """
    for mark, name in (*_BOMS, *_SHAPES):
        if body.startswith(mark):
            return name
    in_header, in_document = _charset(content_type or ""), _declared(body[:_HEAD])
    claims = [
        _codec(in_header[1]) if in_header else None,
        _codec(in_document[1].decode()) if in_document else None,
    ]
    stateful = [
        name for name in claims if name and name.startswith("iso2022")
    ]  # looks like ASCII, and is not
    for name in (
        *stateful,
        "utf-8",
        *(name for name in claims if name and name.startswith("utf-") is False),
    ):
        if name == "iso8859-1":
            break  # on the web that means Windows-1252
        try:
            codecs.decode(body, name, "strict")
        except (UnicodeError, ValueError):
            continue
        return name
    return "cp1252"


def _codec(claim: str) -> str | None:
    try:
        name = codecs.lookup(claim).name
    except (LookupError, ValueError):
        return None
    return name if _KNOWN.fullmatch(name) else None


def text_of(body: bytes, content_type: str | None, limit: int) -> str:
    """Decoded, without what XML cannot hold, and surely without a DTD. Raises Unreadable."""
    if len(body) > limit:
        raise Unreadable(f"has {len(body)} bytes, of at most {limit}")
    text = without_controls(
        codecs.decode(body, encoding_of(body, content_type), "replace").lstrip("\ufeff")
    )
    if (tags := text.count("<")) > MAX_TAGS:
        raise Unreadable(f"has {tags} tags, of at most {MAX_TAGS}")
    refuse_dtd(text)  # after the controls are gone: a NUL inside the word would hide it
    return text


def without_controls(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return _unprintable.sub("", text) if _unprintable.search(text) else text


def mended(text: str) -> str:
    """`&nbsp;` is known to HTML only, `AT&T` to nobody; XML parsers end at both. Raises Unreadable."""
    if text.count("&") > MAX_MENDED:
        raise Unreadable(f"is ill-formed, and has more than {MAX_MENDED} entities")
    return _entity.sub(_character, text)


def _character(m: re.Match[str]) -> str:
    known = html5.get(m[1] + ";") if m[1] else None
    return known if known is not None and known not in "<>&" else "&amp;" + m[0][1:]


def refuse_dtd(text: str) -> None:
    """`<!DOCTYPE`, `<!ENTITY` and their kin anywhere but inside CDATA, comments and instructions,
    where they are words. Linear. Raises Unreadable.
    """
    at = 0
    while found := _special.search(text, at):
        start = found[0]
        if start not in _ENDS:
            html = re.match(r"<!doctype\s+html", text[found.start() : found.start() + 32], re.I)
            raise Unreadable(
                "is an HTML page"
                if html
                else "has a document type declaration (DTD), and none is read"
            )
        at = text.find(_ENDS[start], found.end())
        if at < 0:
            return


def when(text: str | None) -> float | None:
    """Epoch seconds of an RFC 3339 or RFC 822 date, UTC where it names no zone. Never a guess: what
    is no whole date is None.
    """
    if not text or not 4 <= len(text := " ".join(text.split())) <= 64:
        return None
    try:
        if text[:4].isdigit():
            found = datetime.fromisoformat(
                text + ("-01-01", "-01")[len(text) == 7] if len(text) in (4, 7) else text.upper()
            )
        else:
            found = parsedate_to_datetime(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return None
