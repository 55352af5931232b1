"""Limits on JSON documents from outside, checked before they are decoded: values and memory."""

from __future__ import annotations

# Bytes of memory for a small value, as measured with msgspec on `{"a":{}}`. Its text may have two.
VALUE = 90
MAX_VALUES = 400_000  # of a document. They take at most 36 MB.


class TooManyValues(ValueError):
    """The document has more values than the limit. The text completes the sentence "it …"."""


def check_values(raw: bytes, limit: int = MAX_VALUES) -> None:
    """Raise TooManyValues if the document may have more than `limit` values."""
    # A short document cannot have more values than bytes, and needs no count.
    if len(raw) > limit and (found := count_values(raw)) > limit:
        raise TooManyValues(f"has {found} values, of at most {limit}")


def count_values(raw: bytes) -> int:
    """Return the most values that the document can have: its commas, brackets and braces.

    Those inside strings count too, because a tokenizer would take longer than the decoder.
    """
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def memory_of(raw: bytes) -> int:
    """Return about the bytes of memory of the document and its values.

    A batch of documents ends by this size. By the bytes of their text alone, 4 MiB of documents
    could take 130 MiB.
    """
    return len(raw) + VALUE * count_values(raw)
