"""Limit on the number of values in a JSON document from outside, checked before it is decoded."""

from __future__ import annotations

# An empty object takes two bytes of text and 64 bytes of memory. A value takes up to 90 bytes, as
# measured with msgspec on `{"a":{}}`. So the values of a document take at most 36 MB.
MAX_VALUES = 400_000


class TooManyValues(ValueError):
    """The document has more values than the limit. The text completes the sentence "it …"."""


def check_values(raw: bytes, limit: int = MAX_VALUES) -> None:
    """Raise TooManyValues if the document may have more than `limit` values.

    The count is that of commas, brackets and braces. Those inside strings count too, because a
    tokenizer would take longer than the decoder.
    """
    # A short document cannot have more values than bytes, and needs no count.
    if len(raw) > limit and (found := raw.count(b",") + raw.count(b"[") + raw.count(b"{")) > limit:
        raise TooManyValues(f"has {found} values, of at most {limit}")
