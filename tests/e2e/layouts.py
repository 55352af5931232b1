"""Where a pipeline's topics and stores lie, as environment variables and nothing else: the layouts
that the end-to-end tests run on.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.e2e.harness import Project
from tests.servers import Handle

Server = Callable[[str], Handle]
NEEDS: dict[str, tuple[str, ...]] = {
    "apart": (),  # a broker in a file of its own: nothing but the relay is new
    "redis": ("redis",),
    "rabbitmq": ("rabbitmq",),
    "kafka": ("kafka",),
    "sqs": ("sqs",),
    "postgres": ("postgres",),
    "redis+postgres": ("redis", "postgres"),
    "rabbitmq+kafka": ("rabbitmq", "kafka"),  # control topics on one, data topics on the other
}


# as short as the lease of tests that kill: a killed member's partitions go to others that soon
QUICK = "?session=2s&grace=1s"


def layouts(*names: str) -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.server(*NEEDS[name]) if NEEDS[name] else ())
        for name in names
    ]


def lay_out(project: Project, layout: str, server: Server, *, quick: bool = False) -> None:
    """`quick`: for tests that kill. Others must not lose their place in a group because the machine
    stood still for a moment.
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
