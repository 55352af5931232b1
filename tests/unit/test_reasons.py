"""Codes of stored reasons. The sentences, and with them the fingerprints, are those of 0.1.0."""

from __future__ import annotations

import gzip
import re
import tarfile
from pathlib import Path

import apsw
import pytest

from penstock.model import Reason
from penstock.rules.fingerprint import fingerprint
from penstock.rules.reasons import LIBCURL, SENTENCES, code_of, sentence

RELEASE = Path(__file__).parents[1] / "fixtures" / "releases" / "0.1.0"

# Every reason in the ledgers of release 0.1.0, with host names and ids of that run.
STORED_BY_0_1_0 = {
    "HTTP 404": Reason.HTTP,
    "HTTP 500": Reason.HTTP,
    "HTTP 429, retry after 120 s": Reason.RETRY_AFTER,
    "ValueError: the extractor fails on this page": Reason.OTHER,
    "killed by SIGABRT while extracted alone": Reason.KILLED,
    "robots.txt disallows it": Reason.ROBOTS,
    "the body is too large": Reason.BODY,
    "fetched less than its window ago": Reason.WINDOW,
    "the host is to be left alone for now: 127.0.0.1:23302": Reason.HELD,
    "waiting for a slot of 127.0.0.1:23305": Reason.SLOT,
    "duplicate of 0cfc4d9c6d9167952f31b029787b57e4": Reason.DUPLICATE,
    "not a CloudEvents JSON envelope: Input data was truncated": Reason.ENVELOPE,
}

# Sentences as the code before `Reason` made them, with the fingerprints that it stored.
RECORDED = [
    (Reason.UNCHANGED, "unchanged", "c7fbccbbc493"),
    (Reason.EMPTY, "empty", "9f0b908ab7bb"),
    (Reason.UNMATCHED, "unmatched", "0d0395fbc2c2"),
    (Reason.MISSING, "missing, shop.test of shop.test visits", "d906910951ad"),
    (Reason.GONE, "gone", "b398bc4516f4"),
    (Reason.DUPLICATE, "duplicate of shop.test", "1916c6b08250"),
    (Reason.WINDOW, "fetched less than its window ago", "3d63e5b2f324"),
    (Reason.SLOT, "waiting for a slot of shop.test", "b0a1a8323a51"),
    (Reason.SLOT_FAR, "the next slot of shop.test is too far away to wait for", "582522be32ff"),
    (Reason.DUE, "its time has come", "98f376f27419"),
    (Reason.SHUTDOWN, "shutdown", "1ae22612e568"),
    (Reason.WORKER_GONE, "worker gone", "201332c7c0e0"),
    (Reason.REPUBLISHED, "published again: the broker had lost its message", "ca82b1dba66f"),
    (Reason.REDRIVEN, "redriven", "5666006ed1c2"),
    (Reason.PROMOTED, "promoted: shop.test died", "b8be8af71d88"),
    (
        Reason.NEWER_DATA,
        "reopened: shop.test was extracted with older event data",
        "47bf85e1b917",
    ),
    (Reason.HTTP, "HTTP shop.test", "29bc90154832"),
    (Reason.RETRY_AFTER, "HTTP shop.test, retry after 7 s", "9a4bdc3ddc5f"),
    (Reason.EMPTY_BODY, "HTTP shop.test with an empty body", "e002e24f8064"),
    (Reason.CHALLENGE, "HTTP shop.test, but a challenge page (shop.test)", "d6c386a03d90"),
    (Reason.CHALLENGE_ERROR, "HTTP shop.test with a challenge page (shop.test)", "251e2549b32a"),
    (Reason.SOFT_404, "HTTP shop.test, but the page says that there is none", "b4fdbc1d069e"),
    (Reason.UNASKED_304, "HTTP 304, though nothing was asked conditionally", "c2353aa81113"),
    (Reason.NOT_FINAL, "HTTP shop.test is no final answer", "d13c323f2ff1"),
    (Reason.NO_LOCATION, "HTTP shop.test leads nowhere", "36c4f8e3a247"),
    (Reason.TRANSFER, "libcurl error shop.test", "552e54b04014"),
    (Reason.HEADERS, "the answer's headers are larger than the limit", "f1fb1e380bc8"),
    (Reason.CUT, "the answer ended inside its headers", "f5ed0ed7ec0d"),
    (Reason.BODY, "the body is larger than the limit", "54738cd22d22"),
    (Reason.DECODED, "the decoded body is larger than the limit", "63946bae01bb"),
    (Reason.CODINGS, "too many nested content codings", "7932a7d1f858"),
    (Reason.CODING, "the body is not what its content-encoding says", "84907a195dc9"),
    (Reason.CONNECT, "no connection in time", "ee9dd6641c8b"),
    (Reason.FIRST_BYTE, "no first byte in time", "e508ca5e39a1"),
    (Reason.TOTAL, "not finished in time", "1ff7df65ec45"),
    (Reason.RATE, "slower than the minimum rate", "06f91f311d5f"),
    (Reason.SLOW, "too slow while other domains wait for permits", "d4e688c2a3ed"),
    (Reason.BAD_URL, "not a URL we fetch", "b0f597303d78"),
    (Reason.BAD_REQUEST, "not a request we send", "9845ab843023"),
    (Reason.FORBIDDEN, "forbidden address", "aaf513296306"),
    (Reason.ROBOTS, "robots.txt disallows it", "4142bc1d1580"),
    (
        Reason.ROBOTS_LATER,
        "robots.txt cannot be read now, so nothing may be fetched",
        "90d41eb03df1",
    ),
    (Reason.REDIRECTS, "too many redirects", "425a32d57768"),
    (Reason.LOOP, "a redirect leads back to itself", "0cb24255f4c3"),
    (Reason.DOWNGRADE, "a redirect leads from https to http", "a343e6eae42c"),
    (Reason.NOWHERE, "a redirect leads to nothing we fetch", "ec0f896294ab"),
    (Reason.HELD, "the host is to be left alone for now", "2b2c0b76650b"),
    (Reason.PROXY, "the proxy did not let us through", "18cdefbbc8ee"),
    (Reason.BAD_PROXY, "not a proxy we can use", "310bda230e9f"),
    (Reason.SOCKET, "this machine gave us no socket", "595b6b2af9e5"),
    (Reason.CLOSED, "the fetcher is closed", "6ba2fddb5f65"),
    (Reason.NO_POOL, "no proxy pool serves shop.test", "ed532ed8cc0e"),
    (
        Reason.POOL_COOLING,
        "proxy shop.test shop.test exhausted: every proxy cools down for shop.testshop.test",
        "f8a1e0f258c8",
    ),
    (Reason.POOL_EMPTY, "proxy shop.test shop.test exhausted: no proxiesshop.test", "fc47b6c2ae6b"),
    (Reason.POOL_FAILED, "proxy pool 'shop.test'", "7b335832c80e"),
    (Reason.KILLED, "killed by shop.test", "29e988953bf6"),
    (Reason.EXITED, "exited with status shop.test", "1a676ca28c72"),
    (Reason.TIME_LIMIT, "ran longer than 7 s", "ddab87fca25c"),
    (Reason.MEMORY, "ran out of memory (limit shop.test)", "66f017a10964"),
    (Reason.OUTPUT, "made more output than shop.test", "289ff09880a9"),
    (Reason.PIPE, "wrote to the sandbox's own pipe", "6ff07da5750a"),
    (Reason.DESCRIPTORS, "closed file descriptors that are not its own", "999c680cf0e0"),
    (Reason.CANCELLED, "cancelled", "f5fee79e569b"),
    (Reason.NO_CHILD, "no child process could be started", "54f44f6f9350"),
    (Reason.ZYGOTE, "the process that starts children shop.test", "e987f4c6b8fc"),
    (Reason.SANDBOX_CLOSED, "the sandbox was closed", "07ed54f73dc5"),
    (Reason.NOT_ENCODABLE, "this page cannot be handed to its extractor", "16b187589e62"),
    (Reason.EMPTY_KEY, "empty key", "8f70427db7a6"),
    (Reason.NO_SINK, "no sink or hook takes records of extractor 'shop.test'", "ee6780e7760b"),
    (Reason.EXTRACTION, "extraction is not available", "e46def61b908"),
    (
        Reason.NEWER,
        "waiting for a newer worker: shop.test version shop.test is newer than version shop.test",
        "6933f1f96f04",
    ),
    (Reason.WATCHDOG, "watchdog: not done after 7 s", "1a504f414fb9"),
    (Reason.UNRECORDED, "the books refused it", "038fba0c7a87"),
    (Reason.TOO_OLD, "too old to wait any longer", "524a452a2d5b"),
    (Reason.PAGE_GONE, "its stored page is gone", "885504165f92"),
    (
        Reason.MESSAGE_SIZE,
        "its message for `shop.test` has shop.test bytes, more than the broker takes",
        "2cdfbded0966",
    ),
    (Reason.PURGED, "purged by hand", "cdbd9cfe30ba"),
    (
        Reason.BREAKER,
        "breaker: shop.test of shop.test events ended dead within 7 s",
        "72ed73c8c513",
    ),
    (
        Reason.BREAKER_HOSTS,
        "breaker: shop.test of shop.test active hosts are paused after shop.test failures",
        "7cf57b3a038d",
    ),
    (
        Reason.HOST_PAUSED,
        "host shop.test is paused until an operator resumes it",
        "d38fdd31b871",
    ),
    (Reason.BUDGET, "the budget shop.test is used up", "78fa5074ca18"),
    (
        Reason.EXTRACTOR_PAUSED,
        "extractor shop.test is paused until an operator resumes it",
        "8f730782b673",
    ),
    (Reason.HOOK, "the hook raised shop.test", "f3df8e976688"),
    (Reason.NO_ROUTE, "no live worker serves shop.test", "42723bc1506c"),
    (Reason.OTHER_WORKER, "left to another worker, which serves shop.test", "a4e310679e5a"),
    (
        Reason.RENDER,
        "render=true asks for a browser, and this release has no renderer",
        "4ed34cef4c16",
    ),
    (
        Reason.BAD_LINK,
        "the extractor follows a link with a wrong value (shop.test)",
        "57dea0bc5bb9",
    ),
    (Reason.TRANSFER, "the answer is not HTTP", "107bccdf5ae3"),
    (Reason.BAD_URL, "not a URL libcurl takes", "ba99539fd6d6"),
    (Reason.TRANSFER, "libcurl was built without something we need", "0e7d17df8a88"),
    (Reason.PROXY, "the proxy's name did not resolve", "0d4b7eff669a"),
    (Reason.NAME_LOOKUP, "the name did not resolve", "135e287bf25a"),
    (Reason.CONNECTION, "no connection", "1f14cac66b7a"),
    (Reason.TRANSFER, "the answer is not valid HTTP", "cfe1b791969d"),
    (Reason.TRANSFER, "HTTP/2 framing error", "733372073360"),
    (Reason.CONNECTION, "the body ended early", "47620448cb14"),
    (Reason.TRANSFER, "out of memory", "20a22dc117e0"),
    (Reason.TRANSFER, "timed out", "82eb5f4f8374"),
    (Reason.TLS, "the TLS handshake failed", "d2b707e4dabf"),
    (Reason.TRANSFER, "libcurl was called wrongly", "a1408d295ba9"),
    (Reason.TLS, "bad TLS certificate", "ab931637d948"),
    (Reason.CONNECTION, "the server closed without an answer", "d9dda475caf2"),
    (Reason.TLS, "no TLS engine", "ac95bc2d977e"),
    (Reason.CONNECTION, "the connection broke while sending", "7a955bb70466"),
    (Reason.CONNECTION, "the connection broke, or the answer did, while receiving", "753754054986"),
    (Reason.TLS, "our own TLS certificate", "a1b06eac5aea"),
    (Reason.TLS, "no common TLS cipher", "3b09d18a4c76"),
    (Reason.CODING, "broken content encoding", "9b6d51561410"),
    (Reason.BODY, "the body is too large", "077ff95d0604"),
    (Reason.TLS, "our list of certificate authorities cannot be read", "c1e5fa3d2ca6"),
    (Reason.TLS, "bad TLS certificate issuer", "ee7d351e3422"),
    (Reason.TLS, "the TLS key is not the pinned one", "b2ae70ec11e7"),
    (Reason.TLS, "bad TLS certificate status", "236fa429e405"),
    (Reason.TRANSFER, "HTTP/2 stream error", "d246783df7b8"),
    (Reason.CONNECTION, "QUIC connection error", "e88f02194c34"),
    (Reason.PROXY, "the proxy did not connect", "dc8d7cc88f94"),
    (Reason.HEADERS, "the answer's headers are too large", "28c17d6e0f37"),
]


@pytest.mark.parametrize(("text", "code"), STORED_BY_0_1_0.items())
def test_a_reason_that_release_0_1_0_stored_has_a_code(text: str, code: Reason) -> None:
    assert code_of(text) is code


def test_the_table_has_every_reason_of_the_release_fixture(tmp_path: Path) -> None:
    with tarfile.open(RELEASE / "embedded.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    ledger = apsw.Connection(str(tmp_path / ".penstock" / "penstock.db"))
    rows = ledger.execute(
        "SELECT reason FROM event UNION SELECT reason FROM history UNION SELECT reason FROM dead"
    )
    found = {reason for (reason,) in rows if reason}
    ledger.close()
    assert found == set(STORED_BY_0_1_0)


def test_dead_letters_of_release_0_1_0_keep_their_fingerprints() -> None:
    dump = gzip.decompress((RELEASE / "postgres.sql.gz").read_bytes()).decode()
    letter = re.compile(
        r"INSERT INTO fixture\.dead VALUES \(\d+, (?:'[^']*', ){4}[\d.]+,"
        r" '(\w+)', '(\w+)', '([^']*)', '(\w+)'"
    )
    found = letter.findall(dump)
    assert len(found) == 6
    for stage, error_class, reason, stored in found:
        assert fingerprint(stage, error_class, reason) == stored


@pytest.mark.parametrize(("code", "text", "stored"), RECORDED)
def test_a_recorded_sentence_keeps_its_code_and_fingerprint(
    code: Reason, text: str, stored: str
) -> None:
    assert code_of(text) is code
    assert fingerprint("fetch", "permanent", text) == stored


def facts_of(code: Reason) -> list[object]:
    """Return the facts of RECORDED: 7 for a formatted number, shop.test for another fact."""
    fields = re.findall(r"\{(.*?)\}", SENTENCES[code])
    return [7 if field.startswith(":") else "shop.test" for field in fields]


def test_the_sentences_of_today_are_the_recorded_ones() -> None:
    made = {sentence(code, *facts_of(code)) for code in SENTENCES}
    assert made | {text for _, text in LIBCURL.values()} == {text for _, text, _ in RECORDED}


@pytest.mark.parametrize("code", SENTENCES)
def test_a_detail_follows_the_sentence_and_does_not_change_the_code(code: Reason) -> None:
    facts = facts_of(code)
    text = sentence(code, *facts, detail="a {detail}\nof two lines")
    assert text == f"{sentence(code, *facts)}: a {{detail}}\nof two lines"
    assert code_of(text) is code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("exited with status 3 while extracted alone", Reason.EXITED),
        ("bad URL: the host is no DNS name", Reason.BAD_URL),
        ("robots.txt: no connection in time: 5 s", Reason.ROBOTS_LATER),
        ("proxy pool 'p' does not serve geo 'de'", Reason.NO_POOL),
        ("proxy pool 'p': the proxy did not let us through", Reason.POOL_FAILED),
        ("its URL: it has no host", Reason.REFUSED),
        ("its URL cannot be fetched: it has no host", Reason.ENVELOPE),
        ("its window is no length of time", Reason.REFUSED),
        ("KeyError: 'sku'", Reason.OTHER),
        ("paused by hand", Reason.OTHER),
        ("", Reason.OTHER),
        (None, Reason.OTHER),
    ],
)
def test_a_sentence_of_another_module_has_a_code_too(text: str | None, code: Reason) -> None:
    assert code_of(text) is code
