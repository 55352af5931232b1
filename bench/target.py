"""Target site: product pages made from a seed, served by nginx.

nginx listens on twenty loopback addresses and uses one core.
"""

from __future__ import annotations

import gzip
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import BenchError, pin, refuse_taken, say

HOSTS = [f"127.0.0.{n}" for n in range(2, 22)]
PORT, TLS_PORT = 8190, 8193
TEMPLATES = 2000
BIG_EVERY = 5  # every fifth page is long
LAYOUT = "5"  # change it with the form of the pages, so that new files are written

_PROSE = """Walnut and copper lamps, woven rugs, quiet kettles for little kitchens; folding chairs,
    painted shelves and round mirrors
from reclaimed glass, made by hand, oiled and finished in winter, near the window or under the
    stairs, for every narrow hall and tall room."""
_WORDS = sorted(set(re.findall(r"[a-z]+", _PROSE.lower())))
_THINGS = [word for word in _WORDS if word.endswith("s") and len(word) > 4]


def url(i: int, *, tls: bool = False) -> str:
    """Return the URL of the i-th page. Hosts alternate, and each URL and body is different."""
    scheme, port = ("https", TLS_PORT) if tls else ("http", PORT)
    return f"{scheme}://{HOSTS[i % len(HOSTS)]}:{port}{path(i)}"


def path(i: int) -> str:
    return f"/product/{i // len(HOSTS)}.html"


def sku(i: int) -> str:
    return f"P-{i:06d}"


# -- pages -----------------------------------------------------------------------------------------


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def _template(t: int) -> str:
    """Return a template of about 11 kB, or 56 kB for each fifth, with 52 links.

    %SKU% and %HERE% are replaced for each page.
    """
    rng = random.Random(t)
    long = t % BIG_EVERY == BIG_EVERY - 1
    name = f"{_text(rng, 2)} {rng.choice(_THINGS)}".title()
    price = rng.randrange(300, 90000) / 100
    related = "".join(
        f'<li><a class="related"'
        f' href="/product/{rng.randrange(TEMPLATES)}.html?from=%SKU%&amp;at={k}"'
        f' title="{_text(rng, 2)}"><b>{_text(rng, 3)}</b></a></li>'
        for k in range(49)
    )
    facts = "".join(
        f"<tr><th>{_text(rng, 2)}</th><td>{_text(rng, 4)}</td></tr>"
        for _ in range(66 if long else 24)
    )
    opinions = "".join(
        f'<article class="opinion" id="o{k}"><h3>{_text(rng, 4)}</h3><p class="stars"'
        f' data-stars="{rng.randrange(1, 6)}">{rng.randrange(1, 6)}/5</p>'
        f"<p>{_text(rng, 20)}</p><p>{_text(rng, 22)}</p></article>"
        for k in range(114 if long else 3)
    )
    state = ",".join(f'"{w}":{rng.randrange(10**6)}' for w in _WORDS[:24])
    rating, count, brand = (
        rng.randrange(10, 50) / 10,
        rng.randrange(900),
        rng.choice(_THINGS).title(),
    )
    head = (
        f'<meta charset="utf-8"><title>{name} %SKU%</title><meta name="description"'
        f' content="{_text(rng, 18)}">'
        f'<link rel="canonical" href="%HERE%"><link rel="stylesheet" href="/shop.css"><script>var'
        f" state={{{state}}};</script>"
    )
    offer = (
        f'<h1 class="name">{name} %SKU%</h1><p class="maker">by <span class="brand">{brand} &amp;'
        f' Co</span></p><p class="sku" data-sku="%SKU%">%SKU%</p>\n'
        f'<p class="offer"><span class="price" content="{price:.2f}">{price:.2f} €</span></p><div'
        f' class="rating" data-value="{rating}">{count} opinions</div>\n'
        f'<section class="about"><p>{_text(rng, 70)}</p><p>{_text(rng, 55)}</p></section>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><header><nav><a'
        f' href="/">Start</a> <a href="/all.html">All</a></nav></header>\n'
        f'<main>{offer}\n<table class="facts">{facts}</table>\n<section'
        f' class="opinions">{opinions}</section></main>\n'
        f"<aside><ul>{related}</ul></aside><footer><a"
        f' href="/imprint.html">Imprint</a></footer></body></html>\n'
    )


def make_site(directory: Path, n: int) -> None:
    """Write missing ones of the first `n` pages, each also gzipped, and robots.txt files."""
    mark = directory / "made"
    made = 0
    if mark.exists():
        layout, _, count = mark.read_text().partition(" ")
        made = int(count) if layout == LAYOUT else 0
    if made >= n:
        return
    if made == 0:
        shutil.rmtree(directory, ignore_errors=True)
    say(f"making {n - made} pages in {directory}")
    for host in HOSTS:
        (directory / host / "product").mkdir(parents=True, exist_ok=True)
        (directory / host / "robots.txt").write_text(
            "User-agent: *\nDisallow: /basket/\nDisallow: /*?session=\nAllow: /\n"
        )
    templates: dict[int, str] = {}
    for i in range(made, n):
        t = i // len(HOSTS) % TEMPLATES
        if t not in templates:
            templates = {t: _template(t)}  # pages are in order, twenty of each template
        body = templates[t].replace("%SKU%", sku(i)).replace("%HERE%", url(i)).encode()
        file = directory / HOSTS[i % len(HOSTS)] / path(i)[1:]
        file.write_bytes(body)
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(body, 6, mtime=0))
    mark.write_text(f"{LAYOUT} {n}")


def mean_size(directory: Path, n: int) -> int:
    return (
        sum((directory / HOSTS[i % len(HOSTS)] / path(i)[1:]).stat().st_size for i in range(n)) // n
    )


# -- nginx -----------------------------------------------------------------------------------------


def nginx() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("installing nginx with apt: it is the site that all contenders fetch from")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "nginx"]
        subprocess.run(
            ["apt-get", "update", "-qq"], env=environment, stdout=sys.stderr, check=False
        )
        if subprocess.run(
            command, env=environment, stdout=sys.stderr, check=False
        ).returncode == 0 and (found := shutil.which("nginx", path="/usr/sbin:/usr/bin")):
            return found
    raise BenchError(
        "nginx was not found, and the benchmark needs it",
        "install it (Debian/Ubuntu: sudo apt install nginx), then run this again",
    )


def certificate(directory: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for the twenty addresses."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    if not cert.exists():
        if not shutil.which("openssl"):
            raise BenchError(
                "openssl was not found; --tls needs a certificate",
                "install it (Debian/Ubuntu: sudo apt install openssl), then run this again",
            )
        names = ",".join(f"IP:{host}" for host in HOSTS)
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "3650",
            "-subj",
            "/CN=penstock bench",
        ]
        subprocess.run(
            [
                *command,
                "-addext",
                f"subjectAltName={names}",
                "-keyout",
                str(key),
                "-out",
                str(cert),
            ],
            check=True,
            capture_output=True,
        )
    return cert, key


def _configuration(directory: Path, site: Path, *, tls: bool, compressed: bool) -> str:
    port = f"{TLS_PORT} ssl" if tls else str(PORT)
    listens = " ".join(f"listen {host}:{port};" for host in HOSTS)
    lines = (
        [
            f"ssl_certificate {c}; ssl_certificate_key {k}; ssl_session_cache shared:bench:4m;"
            for c, k in [certificate(directory.parent)]
        ]
        if tls
        else []
    )
    lines += ["gzip_static on;"] if compressed else []
    temporary = " ".join(
        f"{what}_temp_path {directory}/{what};"
        for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""
    return (
        f"{user}daemon off; master_process off; pid {directory}/nginx.pid; error_log"
        f" {directory}/error.log warn; worker_rlimit_nofile 16384;\n"
        f"events {{ worker_connections 8192; multi_accept on; }}\n"
        f"http {{ default_type text/html; types {{ text/html html; text/plain txt; }} "
        f"charset utf-8; access_log off; sendfile on; tcp_nopush on;\n"
        f"  keepalive_timeout 300; keepalive_requests 1000000000; open_file_cache max=10000"
        f" inactive=30m; open_file_cache_valid 30m; {temporary}\n"
        f"  {' '.join(lines)}\n  server {{ {listens} root {site}/$server_addr; }} }}\n"
    )


@contextmanager
def serving(
    directory: Path,
    site: Path,
    *,
    core: int,
    tls: bool = False,
    compressed: bool = False,
    nice: int = 0,
) -> Iterator[int]:
    """Run nginx as one process on one core until the block ends. Yield its pid."""
    directory.mkdir(parents=True, exist_ok=True)
    port = TLS_PORT if tls else PORT
    refuse_taken(HOSTS[0], port)
    conf = directory / "nginx.conf"
    conf.write_text(_configuration(directory, site, tls=tls, compressed=compressed))
    with open(directory / "nginx.out", "wb") as out:
        server = subprocess.Popen(
            [nginx(), "-p", str(directory), "-c", str(conf)],
            stdout=out,
            stderr=out,
            preexec_fn=pin({core}, nice),
        )
    try:
        for _ in range(100):
            if server.poll() is not None:
                raise BenchError(
                    f"nginx did not start: {(directory / 'nginx.out').read_text().strip()[-300:]}",
                    f"see {directory}/error.log",
                )
            try:
                socket.create_connection((HOSTS[-1], port), 0.2).close()
                break
            except OSError:
                time.sleep(0.05)
        yield server.pid
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        server.wait()
