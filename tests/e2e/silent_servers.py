"""TCP servers that stop answering, for tests of time limits."""

from __future__ import annotations

import contextlib
import socket
import threading


class BlackHole:
    """A TCP server that accepts connections, reads and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._open.append(self._listener.accept()[0])

    @property
    def connections(self) -> int:
        return len(self._open)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            each.close()


class Relay:
    """A TCP proxy in front of a server. While `silent` is set, it forwards no byte."""

    def __init__(self, port: int) -> None:
        self._to, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.forwards = threading.Event()
        self.forwards.set()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._to))
                self._open += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self.forwards.wait()
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.forwards.set()
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
