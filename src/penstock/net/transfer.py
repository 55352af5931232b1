"""libcurl transfers of one client: an engine (a multi handle) runs exchanges (easy handles).

No policy and no proxies.
"""

from __future__ import annotations

import asyncio
import math
import select
from collections.abc import Callable
from typing import Any

import pycurl

from penstock.model import Reason
from penstock.net.exchange import Exchange, HttpOptions, OnEnd
from penstock.rules.speed import Scarcity
from penstock.rules.verdict import breach

__all__ = ["Engine", "HttpOptions"]

_MAX_BATCH_SECONDS = 0.01  # seconds of transfers before other tasks of the event loop run
_POLL_IN, _POLL_OUT, _POLL_REMOVE = pycurl.POLL_IN, pycurl.POLL_OUT, pycurl.POLL_REMOVE
# Seconds. If the event loop is later than that, it was blocked or the machine was suspended.
_LOOP_LAG_LIMIT = 0.1
_BUSY_LAG = 0.03  # seconds. If the event loop is later than that, it has much to do.
# Seconds after which a transfer is paused. libcurl would otherwise deliver everything that it has
# received, even in very small chunks.
_PAUSE_AFTER = 0.01


class Engine:
    """A libcurl multi handle with its connection pool.

    All its sockets are in one epoll set, which the event loop watches as a single descriptor.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: HttpOptions,
        scarcity: Callable[[], Scarcity | None],
    ) -> None:
        self._loop, self._scarcity = loop, scarcity
        self.active: dict[pycurl.Curl, Exchange] = {}
        self._watched: dict[int, int] = {}  # descriptor → events
        # Watched descriptors that libcurl does not wait for now. With keep-alive, it usually waits
        # for them again within milliseconds.
        self._idle: set[int] = set()
        self._run_scheduled, self._deadline = False, 0.0
        self._pause_deadline = math.inf
        self._paused: dict[Exchange, None] = {}  # paused exchanges, in the order of resuming
        self._curl_timer: asyncio.TimerHandle | None = None
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._check_interval = max(
            0.01,
            min(
                0.25,
                options.connect_timeout / 4,
                options.first_byte_timeout / 4,
                options.total_timeout / 4,
                options.min_rate_span / 4,
            ),
        )
        self._epoll = select.epoll()
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        # Do not limit all connections: libcurl would close idle connections to other hosts.
        self._multi.setopt(pycurl.M_MAXCONNECTS, options.max_idle)
        loop.add_reader(self._epoll.fileno(), self._on_events)

    def start(self, ex: Exchange, on_end: OnEnd) -> None:
        """Start an exchange. `on_end` is called once, by the event loop or by `stop`.

        It is not called before this method returns.
        """
        ex.engine, ex.on_end = self, on_end
        ex.started = self._loop.time()
        self._multi.add_handle(ex.curl)
        self.active[ex.curl] = ex
        self._schedule_run()
        if self._timeout_timer is None:
            self._timeout_timer = self._loop.call_later(self._check_interval, self._check_timeouts)

    def stop(self, ex: Exchange, error: tuple[int, str] | None = None) -> None:
        """End an exchange now. Its connection is closed unless the response is complete."""
        if self.active.pop(ex.curl, None) is None:
            return
        self._paused.pop(ex, None)
        self._multi.remove_handle(ex.curl)
        ex.set_up.bodies.remove(ex)
        ex.on_end(ex, error)

    def close(self) -> None:
        for ex in list(self.active.values()):
            ex.failure = breach(Reason.CLOSED)
            self.stop(ex)
        for timer in (self._curl_timer, self._timeout_timer):
            if timer is not None:
                timer.cancel()
        self._curl_timer = self._timeout_timer = None
        self._multi.close()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _on_socket(self, what: int, fd: int, multi: Any, data: Any) -> None:
        if what == _POLL_REMOVE:
            if fd in self._watched:
                self._idle.add(fd)
            return
        mask = (select.EPOLLIN if what & _POLL_IN else 0) | (
            select.EPOLLOUT if what & _POLL_OUT else 0
        )
        known = self._watched.get(fd)
        if known == mask and fd in self._idle:
            self._idle.discard(fd)
            return
        self._idle.discard(fd)
        self._watched[fd] = mask
        if known is not None:
            try:
                self._epoll.modify(fd, mask)
                return
            except FileNotFoundError:
                pass  # libcurl reused the descriptor number for a new socket without a callback
        self._epoll.register(fd, mask)

    def drop_idle_descriptors(self) -> None:
        """Unregister idle descriptors. Called before a socket is created.

        The socket may get the number of an idle descriptor that was closed. The kernel has removed
        that one from the epoll set, but `_watched` still has it.
        """
        for fd in self._idle:
            self._unregister(fd)
        self._idle.clear()

    def _unregister(self, fd: int) -> None:
        del self._watched[fd]
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # already closed

    def _set_curl_timer(self) -> None:
        """Read libcurl's timeout and set a timer.

        That is cheaper than its timer callback, which libcurl calls twice for every transfer.
        """
        milliseconds = self._multi.timeout()
        if milliseconds < 0:
            self._deadline = 0.0
        elif milliseconds == 0:
            self._schedule_run()
        else:
            # A timer that fires earlier is kept. It checks the deadline again.
            self._deadline = when = self._loop.time() + milliseconds / 1000
            if self._curl_timer is None or self._curl_timer.when() > when:
                if self._curl_timer is not None:
                    self._curl_timer.cancel()
                self._curl_timer = self._loop.call_at(when, self._on_curl_timer)

    def _schedule_run(self) -> None:
        if not self._run_scheduled:
            self._run_scheduled = True
            self._loop.call_soon(self._run_timers)

    def _on_curl_timer(self) -> None:
        self._curl_timer = None
        if not self._deadline:
            return
        if self._loop.time() >= self._deadline - 0.001:
            self._deadline = 0.0
            self._run_timers()
        else:
            self._curl_timer = self._loop.call_at(self._deadline, self._on_curl_timer)

    def _run_timers(self) -> None:
        self._run_scheduled = False
        self._pause_deadline = self._loop.time() + _PAUSE_AFTER
        if self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)[1] != len(self.active):
            self._reap()
        self._set_curl_timer()

    def _on_events(self) -> None:
        action, running, now = self._multi.socket_action, -1, self._loop.time
        until = now() + _MAX_BATCH_SECONDS
        self._pause_deadline = until - _MAX_BATCH_SECONDS + _PAUSE_AFTER
        for fd, event in self._epoll.poll(0, 256):
            # The server usually closed this connection. libcurl notices that at the next use.
            if fd in self._idle:
                self._idle.discard(fd)
                self._unregister(fd)
                continue
            # ERR and HUP are handled by reading.
            running = action(fd, (1 if event & 25 else 0) | (2 if event & 4 else 0))[1]
            if now() > until:
                break  # the other descriptors stay readable
        if running != len(self.active):
            self._reap()
        self._set_curl_timer()

    def must_pause(self, ex: Exchange) -> bool:
        """Return True if this turn has lasted too long. The exchange then continues in another."""
        if self._loop.time() < self._pause_deadline:
            return False
        self.schedule_resume(ex)
        return True

    def schedule_resume(self, ex: Exchange) -> None:
        if not self._paused:
            self._loop.call_soon(self._resume_paused)
        self._paused[ex] = None

    def _resume_paused(self) -> None:
        if self._epoll.closed:
            return
        now = self._loop.time
        until = now() + _MAX_BATCH_SECONDS
        self._pause_deadline = until - _MAX_BATCH_SECONDS + _PAUSE_AFTER
        waiting, self._paused = self._paused, {}
        while waiting and now() < until:
            ex = next(iter(waiting))
            del waiting[ex]
            if ex.curl not in self.active:
                continue
            try:
                ex.curl.pause(pycurl.PAUSE_CONT)  # delivers received data, and may pause again
            except pycurl.error as e:
                self.stop(ex, (e.args[0], str(e.args[-1])))
        if waiting:
            if not self._paused:
                self._loop.call_soon(self._resume_paused)
            self._paused = {**waiting, **self._paused}
        self._set_curl_timer()

    def _reap(self) -> None:
        active, remove = self.active, self._multi.remove_handle
        finished: list[tuple[Exchange, tuple[int, str] | None]] = []
        queued = 1
        while queued:
            queued, good, bad = self._multi.info_read()
            for curl in good:
                remove(curl)
                finished.append((active.pop(curl), None))
            for curl, code, message in bad:
                remove(curl)
                finished.append((active.pop(curl), (code, message)))
        for ex, error in finished:
            if ex.counted_bytes or ex.paused_at:
                ex.set_up.bodies.remove(ex)
            try:
                ex.on_end(ex, error)
            except Exception as e:  # a bug, which must not affect the other exchanges
                self._loop.call_exception_handler(
                    {"message": "the result of an exchange could not be delivered", "exception": e}
                )

    def _check_timeouts(self) -> None:
        """End exchanges that are overdue."""
        now = self._loop.time()
        behind = now - self._timeout_timer.when() if self._timeout_timer is not None else 0.0
        self._timeout_timer = None
        # This process was suspended or blocked. Responses that arrived are not read yet.
        if behind > _LOOP_LAG_LIMIT:
            for ex in self.active.values():
                ex.extend_timeouts(behind, now)
        scarce = self._scarcity()  # always called, because it also finds slow domains
        if behind >= _BUSY_LAG:
            scarce = None  # a busy event loop makes fast servers look slow
        needed = scarce.needed if scarce is not None else 0
        for ex in list(self.active.values()):  # the oldest first
            # The end of another exchange may have ended this one. An exchange that this process has
            # paused does not wait for the server.
            if ex.curl not in self.active or ex.paused_at:
                continue
            failure = ex.overdue(now, scarce if needed > 0 else None)
            if failure is not None:
                needed -= failure.code is Reason.SLOW
                ex.failure = failure
                self.stop(ex)
        if self.active:
            self._timeout_timer = self._loop.call_later(self._check_interval, self._check_timeouts)
