"""Opens the HTTP server of webhooks from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_network

from penstock.config.schema import Config
from penstock.intake.accept import Intake
from penstock.intake.connections import Connections
from penstock.intake.endpoint import Endpoint, Hook
from penstock.intake.http_server import Listener
from penstock.ports import Clock, ServedSource, UnitOfWork
from penstock.rules.senders import is_in


def open_listener(
    config: Config,
    hooks: Sequence[tuple[ServedSource, str, Intake]],
    uow: UnitOfWork,
    clock: Clock,
    *,
    worker: str,
) -> Listener:
    c = config.serve
    proxies = [ip_network(text) for text in c.trusted_proxies]
    endpoint = Endpoint(
        [Hook(source, url, intake) for source, url, intake in hooks],
        uow,
        clock,
        worker=worker,
        timeout=c.timeout,
        proxies=proxies,
    )
    return Listener(
        endpoint,
        host=c.host,
        port=c.port,
        connections=Connections(
            c.max_connections,
            c.max_per_address,
            # A trusted proxy has the connections of many senders.
            is_exempt=lambda address: is_in(address, proxies),
        ),
        timeout=c.timeout,
        grace=config.grace,
        lock=config.state.dir / f"serve-{c.host}-{c.port or worker}.lock",
        clock=clock,
    )
