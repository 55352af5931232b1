"""Sentences of reasons: makes the sentence of a code, and finds the code of a stored sentence.

The ledger stores sentences. Fingerprints of dead letters are hashes of them. So a sentence of this
module must not change without a migration.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from string import Formatter

from penstock.model import Reason

SENTENCES: dict[Reason, str] = {
    Reason.UNCHANGED: "unchanged",
    Reason.EMPTY: "empty",
    Reason.UNMATCHED: "unmatched",
    Reason.MISSING: "missing, {} of {} visits",
    Reason.GONE: "gone",
    Reason.DUPLICATE: "duplicate of {}",
    Reason.WINDOW: "fetched less than its window ago",
    Reason.SLOT: "waiting for a slot of {}",
    Reason.SLOT_FAR: "the next slot of {} is too far away to wait for",
    Reason.DUE: "its time has come",
    Reason.SHUTDOWN: "shutdown",
    Reason.WORKER_GONE: "worker gone",
    Reason.REPUBLISHED: "published again: the broker had lost its message",
    Reason.REDRIVEN: "redriven",
    Reason.PROMOTED: "promoted: {} died",
    Reason.NEWER_DATA: "reopened: {} was extracted with older event data",
    Reason.HTTP: "HTTP {}",
    Reason.RETRY_AFTER: "HTTP {}, retry after {:.0f} s",
    Reason.EMPTY_BODY: "HTTP {} with an empty body",
    Reason.CHALLENGE: "HTTP {}, but a challenge page ({})",
    Reason.CHALLENGE_ERROR: "HTTP {} with a challenge page ({})",
    Reason.SOFT_404: "HTTP {}, but the page says that there is none",
    Reason.UNASKED_304: "HTTP 304, though nothing was asked conditionally",
    Reason.NOT_FINAL: "HTTP {} is no final answer",
    Reason.NO_LOCATION: "HTTP {} leads nowhere",
    Reason.TRANSFER: "libcurl error {}",
    Reason.HEADERS: "the answer's headers are larger than the limit",
    Reason.CUT: "the answer ended inside its headers",
    Reason.BODY: "the body is larger than the limit",
    Reason.DECODED: "the decoded body is larger than the limit",
    Reason.CODINGS: "too many nested content codings",
    Reason.CODING: "the body is not what its content-encoding says",
    Reason.CONNECT: "no connection in time",
    Reason.FIRST_BYTE: "no first byte in time",
    Reason.TOTAL: "not finished in time",
    Reason.RATE: "slower than the minimum rate",
    Reason.SLOW: "too slow while other domains wait for permits",
    Reason.BAD_URL: "not a URL we fetch",
    Reason.BAD_REQUEST: "not a request we send",
    Reason.FORBIDDEN: "forbidden address",
    Reason.ROBOTS: "robots.txt disallows it",
    Reason.ROBOTS_LATER: "robots.txt cannot be read now, so nothing may be fetched",
    Reason.REDIRECTS: "too many redirects",
    Reason.LOOP: "a redirect leads back to itself",
    Reason.DOWNGRADE: "a redirect leads from https to http",
    Reason.NOWHERE: "a redirect leads to nothing we fetch",
    Reason.HELD: "the host is to be left alone for now",
    Reason.PROXY: "the proxy did not let us through",
    Reason.BAD_PROXY: "not a proxy we can use",
    Reason.SOCKET: "this machine gave us no socket",
    Reason.CLOSED: "the fetcher is closed",
    Reason.NO_POOL: "no proxy pool serves {}",
    Reason.POOL_COOLING: "proxy {} {} exhausted: every proxy cools down for {}{}",
    Reason.POOL_EMPTY: "proxy {} {} exhausted: no proxies{}",
    Reason.POOL_FAILED: "proxy pool {!r}",
    Reason.NO_ROUTE: "no live worker serves {}",
    Reason.OTHER_WORKER: "left to another worker, which serves {}",
    Reason.RENDER: "render=true asks for a browser, and this release has no renderer",
    Reason.KILLED: "killed by {}",
    Reason.EXITED: "exited with status {}",
    Reason.TIME_LIMIT: "ran longer than {:g} s",
    Reason.MEMORY: "ran out of memory (limit {})",
    Reason.OUTPUT: "made more output than {}",
    Reason.PIPE: "wrote to the sandbox's own pipe",
    Reason.DESCRIPTORS: "closed file descriptors that are not its own",
    Reason.CANCELLED: "cancelled",
    Reason.NO_CHILD: "no child process could be started",
    Reason.ZYGOTE: "the process that starts children {}",
    Reason.SANDBOX_CLOSED: "the sandbox was closed",
    Reason.NOT_ENCODABLE: "this page cannot be handed to its extractor",
    Reason.EMPTY_KEY: "empty key",
    Reason.BAD_LINK: "the extractor follows a link with a wrong value ({})",
    Reason.NO_SINK: "no sink or hook takes records of extractor {!r}",
    Reason.EXTRACTION: "extraction is not available",
    Reason.NEWER: "waiting for a newer worker: {} version {} is newer than version {}",
    Reason.WATCHDOG: "watchdog: not done after {:g} s",
    Reason.UNRECORDED: "the books refused it",
    Reason.TOO_OLD: "too old to wait any longer",
    Reason.PAGE_GONE: "its stored page is gone",
    Reason.MESSAGE_SIZE: "its message for `{}` has {} bytes, more than the broker takes",
    Reason.PURGED: "purged by hand",
    Reason.BREAKER: "breaker: {} of {} events ended dead within {:g} s",
    Reason.BREAKER_HOSTS: "breaker: {} of {} active hosts are paused after {} failures",
    Reason.HOST_PAUSED: "host {} is paused until an operator resumes it",
    Reason.BUDGET: "the budget {} is used up",
    Reason.EXTRACTOR_PAUSED: "extractor {} is paused until an operator resumes it",
    Reason.HOOK: "the hook raised {}",
}

# CURLcode → code and sentence. Any other CURLcode is a TRANSFER.
LIBCURL: dict[int, tuple[Reason, str]] = {
    1: (Reason.TRANSFER, "the answer is not HTTP"),
    3: (Reason.BAD_URL, "not a URL libcurl takes"),
    4: (Reason.TRANSFER, "libcurl was built without something we need"),
    5: (Reason.PROXY, "the proxy's name did not resolve"),
    6: (Reason.NAME_LOOKUP, "the name did not resolve"),
    7: (Reason.CONNECTION, "no connection"),
    8: (Reason.TRANSFER, "the answer is not valid HTTP"),
    16: (Reason.TRANSFER, "HTTP/2 framing error"),
    18: (Reason.CONNECTION, "the body ended early"),
    27: (Reason.TRANSFER, "out of memory"),
    28: (Reason.TRANSFER, "timed out"),
    35: (Reason.TLS, "the TLS handshake failed"),
    43: (Reason.TRANSFER, "libcurl was called wrongly"),
    47: (Reason.REDIRECTS, "too many redirects"),
    51: (Reason.TLS, "bad TLS certificate"),
    52: (Reason.CONNECTION, "the server closed without an answer"),
    53: (Reason.TLS, "no TLS engine"),
    55: (Reason.CONNECTION, "the connection broke while sending"),
    56: (Reason.CONNECTION, "the connection broke, or the answer did, while receiving"),
    58: (Reason.TLS, "our own TLS certificate"),
    59: (Reason.TLS, "no common TLS cipher"),
    60: (Reason.TLS, "bad TLS certificate"),
    61: (Reason.CODING, "broken content encoding"),
    63: (Reason.BODY, "the body is too large"),
    77: (Reason.TLS, "our list of certificate authorities cannot be read"),
    83: (Reason.TLS, "bad TLS certificate issuer"),
    90: (Reason.TLS, "the TLS key is not the pinned one"),
    91: (Reason.TLS, "bad TLS certificate status"),
    92: (Reason.TRANSFER, "HTTP/2 stream error"),
    96: (Reason.CONNECTION, "QUIC connection error"),
    97: (Reason.PROXY, "the proxy did not connect"),
    100: (Reason.HEADERS, "the answer's headers are too large"),
}

# Stored sentences that other modules make: messages of exceptions with data of users or libraries.
_OTHER_SENTENCES: tuple[tuple[str, Reason], ...] = (
    ("bad URL", Reason.BAD_URL),
    ("bad proxy address", Reason.BAD_PROXY),
    ("the proxy's own address", Reason.PROXY),
    ("the answer could not be read", Reason.TRANSFER),
    ("robots.txt", Reason.ROBOTS_LATER),
    ("there is no proxy pool {}", Reason.NO_POOL),
    ("proxy pool {} does not serve {}", Reason.NO_POOL),
    ("the sandbox is closed", Reason.SANDBOX_CLOSED),
    ("not a CloudEvents JSON envelope", Reason.ENVELOPE),
    ("not a PageMessage", Reason.ENVELOPE),
    ("not a RecordsMessage", Reason.ENVELOPE),
    ("CloudEvents specversion {} is not 1.0", Reason.ENVELOPE),
    ("event type {} is not {}", Reason.ENVELOPE),
    ("an event needs an id and a url; {}", Reason.ENVELOPE),
    ("an id, trace, key, source or cause of more than {}", Reason.ENVELOPE),
    ("its URL cannot be fetched", Reason.ENVELOPE),
    ("its URL", Reason.REFUSED),
    ("its mapping cannot be applied", Reason.REFUSED),
    ("its data {}", Reason.REFUSED),
    ("its {} is no {}", Reason.REFUSED),
    ("its routing {}", Reason.REFUSED),
    ("its {} is neither {}", Reason.REFUSED),
    ("its priority is none of {}", Reason.REFUSED),
    ("there is no URL in it{}", Reason.REFUSED),
    ("the hook's answer {}", Reason.REFUSED),
)


def sentence(code: Reason, *facts: object, detail: object = "") -> str:
    """Return the sentence of a code with its facts, and with the detail after a colon."""
    text = SENTENCES[code].format(*facts)
    return f"{text}: {detail}" if detail else text


def code_of(text: str | None) -> Reason:
    """Return the code of a stored sentence. Return OTHER for text of user code, and for no text."""
    return next((code for parts, code in _patterns() if _fits(parts, text or "")), Reason.OTHER)


@cache
def _patterns() -> list[tuple[list[str], Reason]]:
    """Return the literals of each sentence. Only operators' commands need them.

    Longer sentences come first: "HTTP {}" also fits the sentence of an empty body.
    """
    sentences = [
        *((text, code) for code, text in SENTENCES.items()),
        *((text, code) for code, text in LIBCURL.values()),
        *_OTHER_SENTENCES,
    ]
    found = [(_literals(text), code) for text, code in sentences]
    return sorted(found, key=lambda entry: -sum(map(len, entry[0])))


def _fits(parts: Sequence[str], text: str) -> bool:
    """Return True if the text has the literals in their order, and then nothing or a detail.

    The work is linear in the text.
    """
    at = 0
    for part in parts[:-1]:
        found = text.find(part, at)
        if found < 0 or (at == 0 and found > 0):
            return False
        at = found + len(part)
    last, rest = parts[-1], text[at:]
    if len(parts) == 1:
        return text == last or text.startswith((f"{last}: ", f"{last} while "))
    return rest.endswith(last) or f"{last}: " in rest or f"{last} while " in rest


def _literals(sentence: str) -> list[str]:
    """Return the parts of a sentence between its facts."""
    return [literal for literal, *_ in Formatter().parse(sentence + "{}")]
