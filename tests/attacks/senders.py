"""A stranger that attacks a webhook server: floods, half-sent heads, bodies without an end.

Used as a command, in a separate process: `python senders.py ATTACK PORT`. It writes a line when
the attack has begun, and ends with its standard input.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

SIGNATURE = base64.b64encode(bytes(32)).decode()  # has the form of a signature, but fits no body
MIB = 1 << 20
PADDING = b" " * (MIB - 1)
ITEM = b'{"url": "https://shop.example/p/1"}'
HALF_HEAD = b"POST /hooks/signed HTTP/1.1\r\nHost: 127.0.0.1\r\n"
MANY = tuple(f"127.0.{n // 250}.{n % 250 + 2}" for n in range(500))
EVERY = 0.2  # seconds between two rounds of `hold`
MAX_NEW = 100  # connections that one round of `hold` opens


class Stranger:
    """A client without a secret."""

    def __init__(self, port: int, addresses: tuple[str, ...] = ("127.0.0.1",)) -> None:
        self.port, self.addresses = port, addresses
        self.sent = 0  # connections

    def connect(self) -> socket.socket:
        self.sent += 1
        return socket.create_connection(
            ("127.0.0.1", self.port),
            5,
            source_address=(self.addresses[self.sent % len(self.addresses)], 0),
        )

    def head(self, length: int, *, hook: str = "signed", forged: bool = False) -> bytes:
        signature = (
            f"webhook-id: m{self.sent}\r\nwebhook-timestamp: {int(time.time())}\r\n"
            f"webhook-signature: v1,{SIGNATURE}\r\n"
        )
        return (
            f"POST /hooks/{hook} HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {length}\r\n{signature if forged else ''}\r\n"
        ).encode()

    def flood(self, body: bytes, *, forged: bool = False) -> None:
        """Send complete requests one after the other."""
        while True:
            with contextlib.suppress(OSError), self.connect() as s:
                s.sendall(self.head(len(body), forged=forged) + body)
                while s.recv(65536):
                    pass

    def hold(self, count: int, start: Callable[[], bytes], drip: bytes = b"") -> None:
        """Keep `count` connections with the bytes of `start`. Send `drip` on each in each round.

        A connection that the server closed is opened again.
        """
        held: list[socket.socket] = []
        while True:
            held = [s for s in held if _is_open(s, drip)]
            for _ in range(min(MAX_NEW, count - len(held))):
                with contextlib.suppress(OSError):
                    s = self.connect()
                    held.append(s)
                    s.sendall(start())
            time.sleep(EVERY)


def _is_open(s: socket.socket, drip: bytes) -> bool:
    """Return whether the server has neither answered nor closed. Otherwise close the socket."""
    try:
        s.setblocking(False)
        if drip:
            s.send(drip)
        s.recv(4096)
    except BlockingIOError:
        return True
    except OSError:
        pass
    s.close()
    return False


def unsigned_bodies(s: Stranger) -> None:
    s.hold(70, lambda: s.head(MIB) + PADDING)


def forged_bodies(s: Stranger) -> None:
    s.hold(70, lambda: s.head(MIB, forged=True) + PADDING)


def bodies_for_an_unsigned_hook(s: Stranger) -> None:
    s.hold(70, lambda: s.head(MIB, hook="shop") + PADDING)


def dripping_bodies(s: Stranger) -> None:
    s.hold(300, lambda: s.head(MIB, forged=True), drip=b" ")


def half_heads(s: Stranger) -> None:
    s.hold(256, lambda: HALF_HEAD)


def half_heads_from_many(s: Stranger) -> None:
    s.addresses = MANY
    s.hold(500, lambda: HALF_HEAD)


def dripping_bodies_from_many(s: Stranger) -> None:
    s.addresses = MANY
    dripping_bodies(s)


def unsigned_flood(s: Stranger) -> None:
    s.flood(ITEM)


def forged_flood(s: Stranger) -> None:
    s.flood(ITEM, forged=True)


def large_forged_flood(s: Stranger) -> None:
    s.flood(PADDING, forged=True)


def tiny_chunks(s: Stranger) -> None:
    """Send forged bodies in chunks of one byte."""
    head = s.head(0, forged=True).replace(b"content-length: 0", b"transfer-encoding: chunked")
    while True:
        with contextlib.suppress(OSError), s.connect() as connection:
            connection.sendall(head + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n")
            while connection.recv(65536):
                pass


ATTACKS = [
    unsigned_bodies,
    forged_bodies,
    bodies_for_an_unsigned_hook,
    dripping_bodies,
    dripping_bodies_from_many,
    half_heads,
    half_heads_from_many,
    unsigned_flood,
    forged_flood,
    large_forged_flood,
    tiny_chunks,
]


def main() -> None:
    name, port = sys.argv[1:]
    os.nice(10)  # a stranger elsewhere does not use the CPU of this machine
    attack = next(each for each in ATTACKS if each.__name__ == name)
    stranger = Stranger(int(port))
    threading.Thread(target=attack, args=(stranger,), daemon=True).start()
    time.sleep(1)
    print("begun", flush=True)
    sys.stdin.read()
    print(stranger.sent, flush=True)


if __name__ == "__main__":
    main()
