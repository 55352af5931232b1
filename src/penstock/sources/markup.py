"""Preparation of untrusted XML for a parser: decompress, decode, reject DTDs, apply size limits.

Also parses the dates of feeds and sitemaps.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from html.entities import html5

from penstock.sources.gzip_members import BrokenGzip, GzipMembers

MAX_REPAIRED = 200_000  # most ampersands of an ill-formed document that is repaired
# Bytes of memory that a document and its tree may take together.
MAX_MEMORY = 44 << 20
_PART = 350  # bytes of memory for a tag or an attribute in a tree, as measured with lxml 6
_MAX_GZIP_LAYERS = 2  # some servers compress a file that is already compressed
# Real files have members of many kilobytes. A member without content takes 1 µs.
MAX_MEMBERS = 10_000
_CHUNK = 1 << 16  # bytes or characters that are processed together
_HEAD = 1024

_BOMS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_WIDE_STARTS = (
    (b"<\0\0\0", "utf-32-le"),
    (b"\0\0\0<", "utf-32-be"),
    (b"<\0", "utf-16-le"),
    (b"\0<", "utf-16-be"),
)
# Python can decode more, such as UTF-7 and EBCDIC. Sites do not publish in them, and they can hide
# markup from checks that look at the bytes.
_KNOWN = re.compile(
    r"utf-8|ascii|utf-16(-[lb]e)?|utf-32(-[lb]e)?|iso8859-\d+|cp125\d|cp866|cp874|cp932|cp949|"
    r"koi8-[rtu]|gb2312|gbk|gb18030|big5(hkscs)?|"
    r"euc_jp|euc_kr|shift_jis|iso2022_jp\w*|mac-roman|mac-cyrillic|tis-620"
)
_charset = re.compile(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.I).search
_declared = re.compile(
    rb"<\?xml[^>]{0,200}?encoding\s{0,9}=\s{0,9}[\"']([\w.:-]{1,40})[\"']", re.I
).search
_wide = re.compile(b"[\xf0-\xf4]").search
_unprintable = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_REMOVED = dict.fromkeys(
    n for n in (*range(32), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF) if chr(n) not in "\t\n\r"
)
_special = re.compile(r"<\?|<!(?:\[CDATA\[|--|[A-Za-z\[%]|\s)")
_ENDS = {"<![CDATA[": "]]>", "<!--": "-->", "<?": "?>"}


_entity = re.compile(
    r"&(?!(?:amp|lt|gt|quot|apos|#\d{1,7}|#x[0-9a-fA-F]{1,6});)(?:([A-Za-z][A-Za-z0-9]{1,31});)?"
)


class UnreadableDocument(Exception):
    """The document cannot be parsed. The reason completes the sentence "it …"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def gunzip(body: bytes, limit: int) -> bytes:
    """Decompress a body if its first bytes are those of gzip. Its name and type are ignored.

    Raises UnreadableDocument if it is broken, larger than `limit` or has too many members.
    """
    read = chunks_of(body, limit)
    if body[:2] == b"\x1f\x8b":
        # `getvalue` of BytesIO makes no copy.
        decompressed = io.BytesIO()
        for chunk in read():
            decompressed.write(chunk)
        body = decompressed.getvalue()
    if len(body) > limit:
        raise UnreadableDocument(f"has {len(body)} bytes, of at most {limit}")
    return body


def chunks_of(body: bytes, limit: int) -> Callable[[], Iterator[bytes]]:
    """Return a function that yields the body in chunks, decompressed if it is gzip.

    Each call decompresses the body again, so that it is never in memory as a whole. The chunks
    raise UnreadableDocument as `gunzip` does.
    """

    read: Callable[[], Iterator[bytes]] = partial(_slices, body)
    for layer in range(_MAX_GZIP_LAYERS + 1):
        if next(read(), b"")[:2] != b"\x1f\x8b":
            return read
        if layer < _MAX_GZIP_LAYERS:
            read = partial(_gunzip_again, read, limit)
    raise UnreadableDocument(f"is compressed more than {_MAX_GZIP_LAYERS} times")


def _slices(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), _CHUNK):
        yield body[at : at + _CHUNK]


def _gunzip_again(read: Callable[[], Iterator[bytes]], limit: int) -> Iterator[bytes]:
    return gunzip_chunks(read(), limit)


def gunzip_chunks(chunks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Decompress chunks of gzip data. Bytes after the last member are ignored.

    Raises UnreadableDocument if they are broken, larger than `limit` or have too many members.
    """
    gzip, size = GzipMembers(ignore_rest=True), 0
    for chunk in chunks:
        gzip.feed(chunk)
        while not gzip.needs_input:
            try:
                found = gzip.take(_CHUNK, MAX_MEMBERS)
            except BrokenGzip as e:
                raise UnreadableDocument(f"is broken gzip: {e}") from None
            size += len(found)
            if size > limit:
                raise UnreadableDocument(f"has more than {limit} bytes when it is decompressed")
            if gzip.members > MAX_MEMBERS:
                raise UnreadableDocument(f"has more than {MAX_MEMBERS} gzip members")
            if found:
                yield found
    if gzip.in_member:
        raise UnreadableDocument("is broken gzip: it ends in the middle of the stream")


def encoding_of(body: bytes, content_type: str | None) -> str:
    """Return the encoding of a document. See `encoding_of_chunks`."""
    return encoding_of_chunks(partial(_slices, body), content_type)


def encoding_of_chunks(read: Callable[[], Iterator[bytes]], content_type: str | None) -> str:
    """Return the encoding of a document.

    In this order: a byte order mark, UTF-16 or UTF-32 by the first bytes, UTF-8 if the bytes are
    valid UTF-8, the declared encoding, Windows-1252.
    """
    start = next(read(), b"")
    for mark, name in (*_BOMS, *_WIDE_STARTS):
        if start.startswith(mark):
            return name
    in_header, in_document = _charset(content_type or ""), _declared(start[:_HEAD])
    declared_names = [
        _codec(in_header[1]) if in_header else None,
        _codec(in_document[1].decode()) if in_document else None,
    ]
    # ISO 2022 bytes are also valid ASCII and UTF-8, so it is tried first.
    stateful = [name for name in declared_names if name and name.startswith("iso2022")]
    for name in (
        *stateful,
        "utf-8",
        *(name for name in declared_names if name and name.startswith("utf-") is False),
    ):
        if name == "iso8859-1":
            break  # on the web, ISO 8859-1 means Windows-1252
        if _can_decode(read(), name):
            return name
    return "cp1252"


def _can_decode(chunks: Iterator[bytes], name: str) -> bool:
    """Return whether the chunks are valid in this encoding.

    They are decoded one by one, because a text may take four times the memory of its bytes.
    """
    decoder = codecs.getincrementaldecoder(name)("strict")
    try:
        for chunk in chunks:
            decoder.decode(chunk)
        decoder.decode(b"", True)
    except (UnicodeError, ValueError):
        return False
    return True


def _codec(declared: str) -> str | None:
    try:
        name = codecs.lookup(declared).name
    except (LookupError, ValueError):
        return None
    return name if _KNOWN.fullmatch(name) else None


def text_of(body: bytes, content_type: str | None, limit: int) -> str:
    """Decode a document and remove characters that XML does not allow.

    Raises UnreadableDocument if the document is too large, or its tree would be, or if it has a
    DTD.
    """
    if len(body) > limit:
        raise UnreadableDocument(f"has {len(body)} bytes, of at most {limit}")
    # One character outside the first 65,536 makes each character of the text take four bytes.
    if len(body) * 4 > MAX_MEMORY and _wide(body):
        raise UnreadableDocument(f"is too large to be parsed: it has {len(body)} bytes with emoji")
    text = without_controls(
        codecs.decode(body, encoding_of(body, content_type), "replace").lstrip("\ufeff")
    )
    # After control characters are removed: a NUL inside `<!DOCTYPE` would hide it.
    check_memory(text, len(body), parts=reject_dtd(text))
    return text


def check_memory(text: str, size: int, *, parts: int = 0, copies: int = 1) -> None:
    """Raise UnreadableDocument if parsing would take more memory than `MAX_MEMORY`.

    `size` is the size of the document in bytes, `parts` the number of its tags and attributes, and
    `copies` the number of copies of the text that exist together. A character of a text takes up
    to four bytes.
    """
    if sys.getsizeof(text) * copies + size * 2 + parts * _PART > MAX_MEMORY:
        raise UnreadableDocument(
            f"is too large to be parsed: it has {size} bytes, and {parts} tags and attributes"
        )


def without_controls(text: str) -> str:
    """Remove characters that XML does not allow."""
    if not _unprintable.search(text):
        return text
    # `translate` needs no list of the parts between the removed characters, as `sub` does. It holds
    # the GIL, and 16 MiB take more than a second, so it gets short parts.
    return "".join(text[at : at + _CHUNK].translate(_REMOVED) for at in range(0, len(text), _CHUNK))


def repair_entities(text: str) -> str:
    """Replace HTML entities such as `&nbsp;` and escape bare ampersands such as in `AT&T`.

    XML parsers fail at both. Raises UnreadableDocument if there are too many.
    """
    if text.count("&") > MAX_REPAIRED:
        raise UnreadableDocument(f"is ill-formed, and has more than {MAX_REPAIRED} entities")
    return _entity.sub(_character, text)


def _character(m: re.Match[str]) -> str:
    known = html5.get(m[1] + ";") if m[1] else None
    return known if known is not None and known not in "<>&" else "&amp;" + m[0][1:]


def reject_dtd(text: str) -> int:
    """Raise UnreadableDocument if the text has `<!DOCTYPE`, `<!ENTITY` or a similar declaration.

    Inside CDATA, comments and processing instructions they are plain text. Takes linear time.
    Return the number of tags and attributes outside them.
    """
    at = parts = 0
    while found := _special.search(text, at):
        start = found[0]
        if start not in _ENDS:
            html = re.match(r"<!doctype\s+html", text[found.start() : found.start() + 32], re.I)
            raise UnreadableDocument(
                "is an HTML page"
                if html
                else "has a document type declaration (DTD), which is not allowed"
            )
        parts += _count_parts(text, at, found.start())
        at = text.find(_ENDS[start], found.end())
        if at < 0:
            return parts
    return parts + _count_parts(text, at, len(text))


def _count_parts(text: str, start: int, end: int) -> int:
    tags = text.count("<", start, end) - text.count("</", start, end)
    return tags + text.count("=", start, end)


def parse_date(text: str | None) -> float | None:
    """Return the epoch seconds of an RFC 3339 or RFC 822 date, in UTC if it has no time zone.

    Return None if the text is not a complete date. A year alone, or a year and month, is allowed.
    """
    # A date of a thousand characters is not a date, and its words could fill the memory.
    if not text or len(text) > 1000 or not 4 <= len(text := " ".join(text.split())) <= 64:
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
