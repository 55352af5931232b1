"""Web server that answers each path with a product page made from the path.

`claim` starts it, so that it does not need nginx.
"""

from __future__ import annotations

import asyncio
import sys

_PAGE = (
    '<!doctype html><title>{0}</title><h1 class="name">Lamp {0}</h1><span'
    ' class="brand">Copper</span><p class="sku" data-sku="{0}">{0}</p>'
    '<span class="price" content="12.50">12.50</span><div class="rating" data-value="4.5"></div>'
    + "<p>a quiet kettle for a little kitchen</p>"
    * 40
)


class Answering(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.rest = transport, b""

    def data_received(self, data: bytes) -> None:
        *asked, self.rest = (self.rest + data).split(b"\r\n\r\n")
        for head in asked:
            path = head.split(b" ", 2)[1].decode("ascii", "replace")
            kind, body = (
                ("text/plain", b"User-agent: *\nAllow: /\n")
                if path == "/robots.txt"
                else ("text/html", _PAGE.format(path).encode())
            )
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s"
                % (kind.encode(), len(body), body)
            )


async def main(port: int, hosts: list[str]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Answering, host, port, backlog=1024) for host in hosts]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
