"""Layouts of the end-to-end tests: brokers and stores, set by environment variables only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.e2e.harness import Project
from tests.servers import Handle

Server = Callable[[str], Handle]
NEEDS: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "apart": (),  # broker and ledger in separate files: only the relay is added
    "redis": ("redis",),
    "rabbitmq": ("rabbitmq",),
    "kafka": ("kafka",),
    "sqs": ("sqs",),
    "postgres": ("postgres",),
    "redis+postgres": ("redis", "postgres"),
    "rabbitmq+kafka": ("rabbitmq", "kafka"),  # control topics on one, data topics on the other
}


# As short as the lease in tests that kill: then another member gets the partitions.
QUICK = "?session=2s&grace=1s"


def layouts(*names: str) -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.server(*NEEDS[name]) if NEEDS[name] else ())
        for name in names
    ]


def lay_out(project: Project, layout: str, server: Server, *, quick: bool = False) -> None:
    """Set the project's environment variables for `layout`.

    `quick` gives Kafka a short session timeout, for tests that kill workers. Other tests must not
    lose their group membership when the machine is suspended for a second.
    """
    kafka_options = QUICK if quick else ""
    state = project.dir / ".penstock"
    files = {
        "ledger_url": f"sqlite:{state}/ledger.db",
        "claims_url": f"sqlite:{state}/ledger.db",
        "pages_url": f"file:{state}/pages",
    }
    if layout != "embedded":
        project.set(namespace=f"t{project.mark[:12]}")
    match layout:
        case "apart":
            project.set(broker_url=f"sqlite:{state}/broker.db", **files)
        case "redis":
            project.set(
                broker_url=server("redis").url,
                ledger_url=files["ledger_url"],
                pages_url=files["pages_url"],
            )
        case "rabbitmq" | "sqs":
            project.set(broker_url=server(layout).url, **files)
        case "kafka":
            project.set(broker_url=server("kafka").url + kafka_options, **files)
        case "postgres":
            project.set(broker_url=server("postgres").url)
        case "redis+postgres":
            project.set(broker_url=server("redis").url, ledger_url=server("postgres").url)
        case "rabbitmq+kafka":
            kafka = server("kafka").url + kafka_options
            project.set(
                broker_url=server("rabbitmq").url, topics_pages=kafka, topics_records=kafka, **files
            )
