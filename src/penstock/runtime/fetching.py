"""Builds the HTTP client and the fetch stage of a configuration."""

from __future__ import annotations

import getpass
import os
import socket

from penstock.config.schema import Config
from penstock.fetching.proxies import Proxies, fetch_list
from penstock.fetching.stage import FetchOptions, FetchStage
from penstock.net.guard import Guard, parse_allow
from penstock.net.http import CurlFetcher
from penstock.net.transfer import HttpOptions
from penstock.ports import Fetcher, Traffic
from penstock.rules.robots import product_token
from penstock.runtime.assembly import HostAccess
from penstock.runtime.stores import Politeness

# Maximum bytes of one decoded response to a source. This is the limit of the sitemap protocol.
SOURCE_BODY = 50 * 2**20


def open_fetcher(
    config: Config, traffic: Traffic | None = None, *, max_body: int = 0
) -> CurlFetcher:
    """Return the HTTP client with the configured limits and exceptions.

    `max_body` raises the limit on a response body if it is larger than the configured one.
    `traffic` counts its bytes.
    """
    n = config.net
    max_body = max(n.max_body, max_body)
    guard = Guard(parse_allow(",".join(n.allow)), ports=n.ports)
    options = HttpOptions(
        user_agent=n.user_agent,
        connect_timeout=n.timeout.connect,
        first_byte_timeout=n.timeout.first_byte,
        total_timeout=n.timeout.total,
        max_encoded_bytes=max_body,
        max_decoded_bytes=max_body,
        max_held_bytes=config.fetch.bytes,
        remote_dns=n.remote_dns,
    )
    return CurlFetcher(guard, options, traffic)


def exceptions(config: Config) -> dict[str, str]:
    """Return each rule that a configuration can turn off for all hosts, with the reason.

    The reason is "" if the rule is kept. A worker records the exceptions when it starts.
    """
    return {
        "robots": 'robots = "ignore" in the configuration' if config.robots == "ignore" else "",
        "remote_dns": "net.remote_dns = true in the configuration: proxies resolve names, unchecked"
        if config.net.remote_dns
        else "",
    }


def operator() -> str:
    """Return user@machine of this process, for records of an operator's decisions."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def fetch_options(
    config: Config, *, ignore_robots: bool = False, slot_wait: float = FetchOptions().slot_wait
) -> FetchOptions:
    return FetchOptions(
        slot_wait=slot_wait,
        hop_wait=slot_wait,
        agent=product_token(config.net.user_agent),
        robots="ignore" if ignore_robots else config.robots,
        allow_downgrade=config.fetch.allow_downgrade,
        key_by=config.pace.by,
        soft_404=config.fetch.soft_404,
    )


def open_stage(
    config: Config,
    store: Politeness,
    fetcher: Fetcher,
    pace: HostAccess,
    *,
    lists_by: Fetcher,
    ignore_robots: bool = False,
) -> tuple[FetchStage, Proxies]:
    """Return the fetch stage and the proxies for requests of one command.

    `lists_by` fetches the lists of proxies.
    """
    proxies = Proxies(config.proxies, store.proxies, lists_by, store.clock, store.context.rng)
    options = fetch_options(config, ignore_robots=ignore_robots)
    return FetchStage(fetcher, pace, pace, store.clock, options, proxies), proxies


listed_proxies = fetch_list  # for commands, which may not import the room `fetching`
