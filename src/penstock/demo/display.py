"""The demo's display: turns one snapshot into a frame or into lines of text. It has no state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Events by status, as in `penstock status`. The sum is all accepted events."""

    pending: int = 0
    in_flight: int = 0
    delayed: int = 0
    success: int = 0
    duplicate: int = 0
    dead: int = 0

    @property
    def accepted(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    events: int
    age: float | None  # seconds since the last event, or None before the first one


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    rate: float  # requests a second in the last seconds
    limit: float | None  # None if unlimited
    blocked: float = 0.0  # remaining seconds of a wait that the host requested


@dataclass(frozen=True, slots=True)
class Waiting:
    url: str
    reason: str
    left: float  # seconds


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A change of one field of one record."""

    id: str  # unique, for example the event's id
    what: str
    field: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class DeadPage:
    url: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Data of one frame. Lists are newest first, and the display may cut them."""

    elapsed: float
    total: float | None = None  # seconds until the end, or None without a limit
    title: str = "penstock demo"
    address: str = ""  # URL of the shop
    counts: Counts = Counts()
    sources: tuple[Source, ...] = ()
    hosts: tuple[Host, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    records: int = 0
    changes: int = 0
    unchanged: int = 0
    unmatched: int = 0
    empty: int = 0
    moved: tuple[FieldChange, ...] = ()
    dead: tuple[DeadPage, ...] = ()
    breaker: str = ""  # reason of an open breaker, "" if it is closed
    notice: str = ""  # the demo's last action (`--break`)
    p50: float | None = None  # seconds from event to row
    p95: float | None = None


_STATES = (
    ("success", "success", "green"),
    ("in_flight", "in flight", "cyan"),
    ("pending", "pending", "blue"),
    ("delayed", "delayed", "yellow"),
    ("duplicate", "duplicate", "magenta"),
    ("dead", "dead", "red"),
)
_LINE = "━"
_SOFT = "dim"  # bright black has the colour of the background in some themes


# -- formats ---------------------------------------------------------------------------------------


def _clean(text: str) -> str:
    """Replace unprintable characters, so that scraped text cannot move the cursor."""
    return "".join(c if c.isprintable() else "·" for c in text)


def _path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return _clean(url)
    return (
        _clean(parts.path + ("?" + parts.query if parts.query else ""))
        if parts.netloc and parts.path not in ("", "/")
        else _clean(url)
    )


def _span(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return (
        f"{seconds:.0f} s"
        if seconds < 99.5
        else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
    )


def _ago(age: float | None) -> str:
    return "waiting" if age is None else "just now" if age < 1 else f"{_span(float(int(age)))} ago"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


# -- frames ----------------------------------------------------------------------------------------


def render(snapshot: Snapshot, width: int) -> RenderableType:
    """Return one frame for rich.live.Live.

    The height depends only on the width and the number of sources and hosts, so the lines keep
    their places.
    """
    s, inner = snapshot, max(width, 42) - 2
    wide = inner >= 74
    lines: list[Text] = [
        _header(s, inner),
        Text(),
        *_sources_and_hosts(s, inner, wide),
        Text(),
        *_events(s, inner, wide),
        Text(),
        _outputs(s, inner),
        *_fill(_changes(s, inner, 3), 3),
        Text(),
        _heading("delayed", f"{s.counts.delayed}   ") + _heading("dead", f"{s.counts.dead}"),
        *_fill(_delayed_and_dead(s, inner, 4), 4),
        _remark(s, inner),
    ]
    picture = Text("\n").join(lines)
    picture.no_wrap, picture.overflow = True, "ellipsis"
    return Padding(picture, (0, 1))


def _fill(lines: Iterable[Text], count: int) -> list[Text]:
    lines = list(lines)
    return lines + [Text()] * (count - len(lines))


def _heading(name: str, detail: str) -> Text:
    return Text.assemble((name, "bold"), ("  " + detail, _SOFT))


def _line(width: int, left: Text, right: Text | None = None) -> Text:
    """Return a line of exactly `width` cells, with `left` cut if necessary, `right` at the edge."""
    if right is None or not right.cell_len:
        left.truncate(width, overflow="ellipsis", pad=True)
        return left
    left.truncate(width - right.cell_len - 1, overflow="ellipsis", pad=True)
    return left + Text(" ") + right


def _row(width: int, mark: Text, what: str, reason: Text) -> Text:
    """Return a row of three columns, for changes and for delayed or dead events."""
    name = min(44, (width - 8) * 2 // 5)
    # With `+`, the style of the first part would apply to the whole row.
    return Text.assemble(
        _line(8, mark), _line(name, Text(what)), "  ", _line(width - 10 - name, reason)
    )


def _header(s: Snapshot, width: int) -> Text:
    running = _clock(s.elapsed) + (f" of {_clock(s.total)}" if s.total is not None else "")
    return _line(
        width,
        Text.assemble((s.title, "bold cyan"), ("   " + _clean(s.address), _SOFT)),
        Text(running, "bold"),
    )


def _sources_and_hosts(s: Snapshot, inner: int, wide: bool) -> Iterable[Text]:
    half = (inner - 4) // 2 if wide else inner
    left = [_heading("sources", "events, and the last one"), *_sources(s, half)]
    right = [_heading("hosts", "requests a second"), *_hosts(s, half)]
    if not wide:
        return (*left, *right)
    rows = max(len(left), len(right))
    return (
        _line(half, a) + Text("    ") + b
        for a, b in zip(_fill(left, rows), _fill(right, rows), strict=True)
    )


def _sources(s: Snapshot, width: int) -> Iterable[Text]:
    for source in s.sources:
        fresh = source.age is not None and source.age < 1
        right = Text.assemble(
            (f"{source.events:>6}", "bold"),
            (f"  {_ago(source.age):>9}", "cyan" if fresh else _SOFT),
        )
        yield _line(
            width,
            Text.assemble(
                ("● " if fresh else "○ ", "cyan" if fresh else _SOFT), _clean(source.name)
            ),
            right,
        )


def _hosts(s: Snapshot, width: int) -> Iterable[Text]:
    for host in s.hosts:
        if host.blocked > 0:
            right = Text(f"asked to wait {_span(host.blocked)}", "yellow")
        elif host.limit is None:
            right = Text.assemble((f"{host.rate:.1f}", "bold"), (" no limit", _SOFT))
        else:
            room = max(6, min(20, width - 34))
            used = round(room * min(1.0, host.rate / host.limit)) if host.limit else 0
            figure = ((f"  {host.rate:4.1f}", "bold"), (f" of {host.limit:g}", _SOFT))
            right = Text.assemble((_LINE * used, "cyan"), (_LINE * (room - used), _SOFT), *figure)
        yield _line(width, Text(_clean(host.name)), right)


def _events(s: Snapshot, inner: int, wide: bool) -> Iterable[Text]:
    yield _line(inner, _heading("events", f"{s.counts.accepted} accepted"), _latency(s))
    yield _stacked(s.counts, inner)
    cells = [(getattr(s.counts, name), label, style) for name, label, style in _STATES]
    if wide:  # each count above its name
        size = inner // len(cells)
        yield Text().join(
            _line(size, Text(f"{count}", f"bold {style}" if count else _SOFT))
            for count, _, style in cells
        )
        yield Text().join(
            _line(size, Text(label, "" if count else _SOFT)) for count, label, _ in cells
        )
        return
    for part in (cells[:3], cells[3:]):
        yield Text().join(
            _line(
                inner // 3,
                Text.assemble((f"{count} ", f"bold {style}" if count else _SOFT), (label, _SOFT)),
            )
            for count, label, style in part
        )


def _latency(s: Snapshot) -> Text:
    if s.p50 is None or s.p95 is None:
        return Text("event → row", _SOFT)
    return Text.assemble(
        ("event → row  p50 ", _SOFT),
        (_span(s.p50), "bold"),
        ("  p95 ", _SOFT),
        (_span(s.p95), "bold"),
    )


def _stacked(counts: Counts, width: int) -> Text:
    """Return a bar of all accepted events. Each non-zero status has at least one cell."""
    total = counts.accepted
    if not total:
        return Text(_LINE * width, _SOFT)
    shares = [(style, getattr(counts, name)) for name, _, style in _STATES if getattr(counts, name)]
    cells = [max(1, count * width // total) for _, count in shares]
    cells[cells.index(max(cells))] += width - sum(cells)
    return Text.assemble(*((_LINE * n, style) for (style, _), n in zip(shares, cells, strict=True)))


def _outputs(s: Snapshot, width: int) -> Text:
    silent = [
        (f" · {count} {label}", "yellow" if count else _SOFT)
        for count, label in ((s.empty, "empty"), (s.unmatched, "unmatched"))
    ]
    return _line(
        width,
        _heading("records", f"{s.records} rows · {s.changes} changes · {s.unchanged} unchanged")
        + Text.assemble(*silent),
    )


def _changes(s: Snapshot, width: int, count: int) -> Iterable[Text]:
    if not s.moved:
        yield _line(width, Text("no price has moved yet", _SOFT))
    for n, moved in enumerate(s.moved[:count]):
        arrow = Text.assemble(
            (_clean(moved.old), _SOFT),
            (" → ", _SOFT),
            (_clean(moved.new), "bold green" if n == 0 else "green"),
        )
        yield _row(width, Text(_clean(moved.field), _SOFT), _clean(moved.what), arrow)


def _delayed_and_dead(s: Snapshot, width: int, count: int) -> Iterable[Text]:
    """Yield dead events, then delayed events, the next due first.

    Dead events take more than half of the rows only if the delayed events leave rows free.
    """
    dead = s.dead[: max(count // 2, count - len(s.waiting))]
    waiting = sorted(s.waiting, key=lambda w: w.left)[: count - len(dead)]
    if not dead and not waiting:
        yield _line(width, Text("no delayed or dead events", _SOFT))
    for item in dead:
        yield _row(width, Text("dead", "red"), _path(item.url), Text(_clean(item.reason)))
    for delayed in waiting:
        yield _row(
            width,
            Text(_span(delayed.left), "yellow"),
            _path(delayed.url),
            Text(_clean(delayed.reason)),
        )


def _remark(s: Snapshot, width: int) -> Text:
    """Return the most important notice: an open breaker, pages without a row, or the notice."""
    if s.breaker:
        return _line(width, Text.assemble(("■ stopped  ", "bold red"), _clean(s.breaker)))
    if s.empty or s.unmatched:
        found = [f"{s.empty} gave nothing"] * bool(s.empty) + [
            f"{s.unmatched} fit no extractor"
        ] * bool(s.unmatched)
        return _line(
            width,
            Text.assemble(
                ("▲ pages without a row: ", "bold yellow"),
                (", ".join(found), "yellow"),
                (f"   {_clean(s.notice)}", _SOFT),
            ),
        )
    return _line(width, Text(_clean(s.notice), _SOFT))


# -- text ------------------------------------------------------------------------------------------


def plain(snapshot: Snapshot, before: Snapshot | None = None) -> str:
    """Return text for logs and pipes: a line of counts, and a line for each news since `before`."""
    s, was = snapshot, before or Snapshot(elapsed=0)
    figures = [
        f"{getattr(s.counts, name)} {label}"
        for name, label, _ in _STATES
        if getattr(s.counts, name)
    ]
    others = ((s.unchanged, "unchanged"), (s.empty, "empty"), (s.unmatched, "unmatched"))
    line = (
        f"{s.elapsed:6.1f} s  {s.counts.accepted} accepted"
        + (f" ({', '.join(figures)})" if figures else "")
        + f"  {s.records} {'row' if s.records == 1 else 'rows'}"
        + f", {s.changes} {'change' if s.changes == 1 else 'changes'}"
        + "".join(f", {count} {label}" for count, label in others if count)
    )
    if s.p50 is not None and s.p95 is not None:
        line += f"  event→row p50 {_span(s.p50)}, p95 {_span(s.p95)}"
    seen, known, dead = {m.id for m in was.moved}, {w.url for w in was.waiting}, set(was.dead)
    news = [
        *(
            f"changed  {_clean(m.what)}: {_clean(m.field)} {_clean(m.old)} → {_clean(m.new)}"
            for m in reversed(s.moved)
            if m.id not in seen
        ),
        *(
            f"delayed  {_clean(w.url)}: {_clean(w.reason)}, {_span(w.left)} left"
            for w in s.waiting
            if w.url not in known
        ),
        *(f"dead     {_clean(d.url)}: {_clean(d.reason)}" for d in s.dead[::-1] if d not in dead),
    ]
    if s.breaker and s.breaker != was.breaker:
        news.append(f"stopped  {_clean(s.breaker)}")
    if s.notice and s.notice != was.notice:
        news.append(f"note     {_clean(s.notice)}")
    return "\n".join([line, *("          " + item for item in news)])
