"""Two network namespaces for tests: `home` runs Penstock, and in `world` every address responds.

    home ── veth ── world      a few addresses are normal sites, all others are canaries
     └ lo: canaries as well

The namespaces are private, and end with the process that holds them (this file, run as a script).
`notes.jsonl` records every accepted connection, every name lookup, every proxy request and every
first packet that left home, including loopback. The packets are the proof: they show every address
that any code dialled, libraries included, even if no server listened. strace is not enough:
getaddrinfo connects UDP sockets to the addresses that it sorts, without sending a packet.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

HOME4, HOME6 = "198.41.1.1", "2a01:4f8:1::1"
DNS, GATEWAY6 = "198.41.1.2", "2a01:4f8:1::2"
GOOD4, GOOD6, PROXY = "198.41.0.4", "2001:503:ba3e::2:30", "199.7.83.42"
HTTP_PORTS = (22, 25, 80, 443, 2375, 5432, 6379, 8000, 8080, 8443, 9200, 11211)
HTTP_PROXY, SOCKS_PROXY = 3128, 1080
PORTS = (*HTTP_PORTS, HTTP_PROXY, SOCKS_PROXY)
MARKER = 9  # UDP port. When this packet is recorded, all earlier packets are recorded too.
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}
_TCP, _UDP = 6, 17


class Sent(NamedTuple):
    """The first packet of a connection, or a datagram."""

    protocol: int
    address: str
    port: int


class Unavailable(Exception):
    """This machine does not provide network namespaces."""


class Wall:
    """Both namespaces, until `close`.

    The test may change `zone` (the name server's records) and `redirects` (the target of /to/<n>)
    at any time.
    """

    def __init__(self, directory: Path) -> None:
        install()
        self.dir = directory
        self.dir.mkdir()
        self.zone({})
        self.redirects([])
        self._from = 0
        own = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
        self._holder = subprocess.Popen(
            ["unshare", *own, "--net", "--mount", sys.executable, __file__, "home", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            assert self._holder.stderr is not None
            raise Unavailable(self._holder.stderr.read()[-2000:])

    def command(self, directory: Path, *args: str) -> list[str]:
        """Return the command line that runs `args` in the `home` namespace."""
        own = [] if os.getuid() == 0 else ["--user", "--preserve-credentials"]
        inside = ["nsenter", "--target", str(self._holder.pid), *own, "--net", "--mount"]
        return [*inside, "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(directory), *args]

    def zone(self, names: dict[str, list[dict[str, list[str]]]]) -> None:
        """Set name → the records of the first lookup, the second, … The last one repeats."""
        _replace(self.dir / "zone.json", names)

    def redirects(self, targets: list[str]) -> None:
        _replace(self.dir / "redirects.json", targets)

    def read_notes(self) -> list[dict[str, Any]]:
        """Return all notes since the previous call."""
        probe = (
            "import socket; "
            f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ({DNS!r}, "
            f"{MARKER}))"
        )
        subprocess.run(self.command(self.dir, sys.executable, "-c", probe), check=True, timeout=120)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            # The last line is empty or incomplete.
            lines = (self.dir / "notes.jsonl").read_bytes().split(b"\n")[self._from : -1]
            notes = [json.loads(line) for line in lines]
            at = next((i for i, n in enumerate(notes) if n.get("port") == MARKER), None)
            if at is not None:
                assert not notes[at]["lost"], "packets were lost before they were recorded"
                self._from += len(notes)
                return notes[:at] + notes[at + 1 :]
            time.sleep(0.02)
        raise AssertionError("the sniffer recorded no marker packet")

    def close(self) -> None:
        self._holder.communicate(timeout=60)


def install() -> None:
    """Install the tools that create the namespaces. Raise Unavailable if that is impossible."""
    if sys.platform != "linux":
        raise Unavailable("network namespaces exist only on Linux")
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if not missing:
        return
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"missing: {' '.join(missing)} (apt install {' '.join(missing)})")
    from tools.services.state import (
        cache_directory,
        locked,
    )  # not importable when this file runs as a script

    print(f"installing {' '.join(missing)} with apt, for network namespaces", file=sys.stderr)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with locked(cache_directory() / "apt.lock"):  # the lock of tools/services: one apt at a time
        for args in (["update", "-qq"], ["install", "-y", "-qq", *missing]):
            done = subprocess.run(
                ["apt-get", *args], env=env, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise Unavailable(f"apt-get {args[0]}: {done.stderr[-500:]}")


def sent(notes: list[dict[str, Any]]) -> set[Sent]:
    return {Sent(n["protocol"], n["to"], n["port"]) for n in notes if "to" in n}


def contacts(notes: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Return (address, port) of every connection from home that a server accepted."""
    return {(n["at"], n["port"]) for n in notes if "at" in n}


def _replace(path: Path, value: Any) -> None:
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").replace(path)


# -- inside ----------------------------------------------------------------------------------------


def _sh(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{line}: {done.stderr.strip()}")


class _Notes:
    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory / "notes.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, **note: Any) -> None:
        os.write(self._fd, json.dumps(note).encode() + b"\n")


def _home(directory: Path) -> None:
    notes = _Notes(directory)
    _sh("ip link set lo up")
    for name, text in (
        ("resolv.conf", f"nameserver {DNS}\noptions timeout:30 attempts:2\n"),
        ("nsswitch.conf", "hosts: files dns\n"),
    ):
        (directory / name).write_text(text)
        _sh(f"mount --bind {directory / name} {os.path.realpath('/etc/' + name)}")
    world = subprocess.Popen(
        ["unshare", "--net", sys.executable, __file__, "world", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert world.stdin is not None
    assert world.stdout is not None
    world.stdout.readline()  # the namespace exists
    _sh("ip link add out type veth peer name in")
    _sh(f"ip link set in netns {world.pid}")
    for line in (
        f"addr add {HOME4}/24 dev out",
        f"addr add {HOME6}/64 dev out nodad",
        "link set out up",
    ):
        _sh(f"ip {line}")
    world.stdin.write("go\n")
    world.stdin.flush()
    if not world.stdout.readline():  # the servers listen
        sys.exit("the world namespace did not start")
    _sh(f"ip route add default via {DNS}")
    _sh(f"ip -6 route add default via {GATEWAY6}")
    threading.Thread(target=_sniff, args=(notes, _open_sniffer()), daemon=True).start()
    asyncio.run(_until_closed(_listen(notes, directory)))
    world.stdin.close()
    world.wait()


def _world(directory: Path) -> None:
    print("there", flush=True)
    sys.stdin.readline()
    for line in (
        "link set lo up",
        f"addr add {DNS}/24 dev in",
        f"addr add {GATEWAY6}/64 dev in nodad",
        "link set in up",
        # every address is local
        "route add local default dev lo table main",
        "-6 route add local default dev lo table main",
    ):
        _sh(f"ip {line}")
    notes = _Notes(directory)

    async def open_all() -> None:
        await _listen(notes, directory)
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: _NameServer(notes, directory), (DNS, 53))

    asyncio.run(_until_closed(open_all()))


async def _until_closed(opening: Any) -> None:
    await opening
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _listen(notes: _Notes, directory: Path) -> None:
    for port in PORTS:
        with socket.socket(socket.AF_INET6) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            s.bind(("::", port))
            await asyncio.start_server(_Site(notes, directory, port).serve, sock=s.dup())


def _open_sniffer() -> socket.socket:
    """Open a socket that receives every packet from now on."""
    s = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))  # all protocols
    try:
        s.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE
    except PermissionError:  # needs root of the machine. Lost packets are counted.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
    return s


def _sniff(notes: _Notes, s: socket.socket) -> None:
    """Record the packets that leave home."""
    while True:
        packet, (_, _, direction, *_) = s.recvfrom(65536)
        if direction != 4 or not packet:  # PACKET_OUTGOING
            continue
        if packet[0] >> 4 == 4:
            protocol, to, rest = packet[9], packet[16:20], packet[(packet[0] & 15) * 4 :]
        elif packet[0] >> 4 == 6:
            protocol, to, rest = packet[6], packet[24:40], packet[40:]
        else:
            continue  # ARP
        address = ipaddress.ip_address(to)
        if protocol in (0, 1, 58):  # sent by the kernel: neighbours, groups, "port unreachable"
            continue
        if protocol == _TCP and rest[13] & 0x12 != 0x02:  # not a SYN alone
            continue
        port = int.from_bytes(rest[2:4], "big")
        if port == MARKER:
            notes.add(
                to=str(address),
                protocol=protocol,
                port=port,
                lost=int.from_bytes(s.getsockopt(263, 6, 8)[4:], sys.byteorder),
            )  # PACKET_STATISTICS
        else:
            notes.add(to=str(address), protocol=protocol, port=port)


class _NameServer(asyncio.DatagramProtocol):
    def __init__(self, notes: _Notes, directory: Path) -> None:
        self.notes, self.dir = notes, directory
        self.asked: dict[tuple[str, int], int] = {}

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        at, labels = 12, []
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1").lower())
            at += 1 + data[at]
        name, kind = ".".join(labels), int.from_bytes(data[at + 1 : at + 3], "big")
        question = data[12 : at + 5]
        self.notes.add(asked=name, type={1: "A", 28: "AAAA"}.get(kind, str(kind)))
        zone = json.loads((self.dir / "zone.json").read_text())
        steps = zone.get(name)
        answers: list[bytes] = []
        owner = b"\xc0\x0c"
        if steps:
            n = self.asked[name, kind] = self.asked.get((name, kind), 0) + 1
            step = steps[min(n, len(steps)) - 1]
            for alias in step.get("CNAME", []):
                answers.append(_record(owner, 5, target := _name(alias)))
                owner, step = target, zone[alias][0]
            if kind in (1, 28):
                answers += [
                    _record(owner, kind, ipaddress.ip_address(a).packed)
                    for a in step.get("A" if kind == 1 else "AAAA", [])
                ]
        flags = b"\x81\x80" if steps else b"\x81\x83"  # otherwise NXDOMAIN
        self.transport.sendto(
            data[:2]
            + flags
            + b"\0\1"
            + len(answers).to_bytes(2, "big")
            + b"\0\0\0\0"
            + question
            + b"".join(answers),
            addr,
        )


def _name(text: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in text.split(".")) + b"\0"


def _record(owner: bytes, kind: int, value: bytes) -> bytes:
    """Return a record with a TTL of 0, as an attacker would send."""
    return (
        owner
        + kind.to_bytes(2, "big")
        + b"\0\1"
        + b"\0\0\0\0"
        + len(value).to_bytes(2, "big")
        + value
    )


INWARD = "http://169.254.169.254/latest/meta-data/"
# Everything that a client could fetch without being asked to.
GOOD_PAGE = f"""<!doctype html><html><head><title>good</title>\
<base href="/p/"><link rel="stylesheet preload" href="{INWARD}style.css">
<meta http-equiv="refresh" content="0; url={INWARD}"><script src="{INWARD}s.js"></script></head>
<body><main data-sku="GOOD"><h1>good</h1><p class="price">1</p>\
<img src="{INWARD}i.png"><iframe src="{INWARD}"></iframe>
</main></body></html>"""
LINKS = "".join(
    f'<a class="related" href="{url}">x</a>'
    for url in (
        f"{INWARD}p/followed",
        "http://127.0.0.1/p/followed",
        "http://inward.evil.test/p/followed",
    )
)
GOOD_HEADERS = (
    f'Alt-Svc: h2="10.0.0.5:80", h3="169.254.169.254:443"; ma=3600\r\nLink: <{INWARD}>; '
    f"rel=preload\r\nRefresh: 0; url={INWARD}\r\n"
    f"Content-Location: {INWARD}\r\nLocation: {INWARD}\r\nStrict-Transport-Security: max-age=9\r\n"
)
CANARY_PAGE = '<!doctype html><main data-sku="CANARY"><h1>this was never to be seen</h1></main>'


class _Site:
    """A server on one port, at every address of the namespace."""

    def __init__(self, notes: _Notes, directory: Path, port: int) -> None:
        self.notes, self.dir, self.port = notes, directory, port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Normalized: every address has one spelling.
        here = str(
            ipaddress.ip_address(writer.get_extra_info("sockname")[0].removeprefix("::ffff:"))
        )
        self.notes.add(at=here, port=self.port)
        try:
            if here == PROXY and self.port == SOCKS_PROXY:
                await self._socks(reader, writer)
            elif here == PROXY and self.port == HTTP_PROXY:
                await self._http_proxy(reader, writer)
            else:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(here, head.decode("latin-1")))
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, here: str, head: str) -> bytes:
        path = head.split(" ")[1]
        status, headers, body = "200 OK", "", CANARY_PAGE
        if here in (GOOD4, GOOD6) or (here, self.port) == ("127.0.0.1", 8000):
            body = GOOD_PAGE.replace('"GOOD"', f'"GOOD {path}"').replace(
                "</main>", f"{LINKS if path == '/p/links' else ''}</main>"
            )
            if path == "/robots.txt":
                status, body = "404 Not Found", ""
                if "host: robots.test" in head.lower():
                    status, headers = "302 Found", f"Location: {INWARD}robots.txt\r\n"
            elif path.startswith("/to/"):
                target = json.loads((self.dir / "redirects.json").read_text())[int(path[4:])]
                status, headers, body = "302 Found", f"Location: {target}\r\n", ""
            elif path == "/proxies.txt":
                body = "http://10.0.0.5:3128\nsocks5://127.0.0.1:1080\n"
            else:
                headers = GOOD_HEADERS
        raw = body.encode()
        return (
            f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\n"
            f"{headers}Content-Length: {len(raw)}\r\n\r\n"
        ).encode() + raw

    async def _http_proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        self.notes.add(proxied=f"{method} {target}")
        place = target if method == "CONNECT" else target.removeprefix("http://").partition("/")[0]
        host, _, port = (
            place.rpartition(":") if place.rpartition(":")[2].isdigit() else (place, "", "80")
        )
        upstream = await asyncio.open_connection(host.strip("[]"), int(port))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            upstream[1].write(
                head.replace(
                    target.encode(),
                    b"/" + target.removeprefix("http://").partition("/")[2].encode(),
                    1,
                )
            )
        await _join(reader, writer, *upstream)

    async def _socks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly((await reader.readexactly(2))[1])
        writer.write(b"\x05\x00")
        kind = (await reader.readexactly(4))[3]
        size = (await reader.readexactly(1))[0] if kind == 3 else 4 if kind == 1 else 16
        raw = await reader.readexactly(size)
        host = raw.decode() if kind == 3 else str(ipaddress.ip_address(raw))
        port = int.from_bytes(await reader.readexactly(2), "big")
        self.notes.add(proxied=f"SOCKS {host}:{port}")
        upstream = await asyncio.open_connection(host, port)
        writer.write(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
        await _join(reader, writer, *upstream)


async def _join(
    a: asyncio.StreamReader,
    aw: asyncio.StreamWriter,
    b: asyncio.StreamReader,
    bw: asyncio.StreamWriter,
) -> None:
    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(65536):
                target.write(chunk)
                await target.drain()
        finally:
            target.close()

    await asyncio.gather(copy(a, bw), copy(b, aw), return_exceptions=True)


if __name__ == "__main__":
    (_home if sys.argv[1] == "home" else _world)(Path(sys.argv[2]))
