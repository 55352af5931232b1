"""RabbitMQ: the suite every broker passes, and what is its own: the ladder, unroutable messages, alarms, outages, and how it says no."""

from __future__ import annotations

import base64
import json
import secrets
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.brokers.served import Served
from tests.servers import Handle

from penstock.brokers.rabbitmq import RabbitBroker
from penstock.brokers.rabbitmq_link import read_address
from penstock.clock import SystemClock

pytestmark = pytest.mark.server("rabbitmq")


class Host:
    """A virtual host of its own, with everything in it gone afterwards; and what an administrator can do."""

    def __init__(self, server: Handle) -> None:
        self.server, self.vhost = server, "t" + secrets.token_hex(4)
        self.url = server.url + self.vhost
        self.ask("PUT", f"vhosts/{self.vhost}")
        self.ask("PUT", f"permissions/{self.vhost}/guest", {"configure": ".*", "write": ".*", "read": ".*"})

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        address = f"http://127.0.0.1:{self.server.ports('management')}/api/{path}"
        headers = {"authorization": "Basic " + base64.b64encode(b"guest:guest").decode(), "content-type": "application/json"}
        request = urllib.request.Request(address, method=method, headers=headers, data=None if body is None else json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def broker(self, url: str = "", **more: Any) -> RabbitBroker:
        return RabbitBroker(read_address(url or self.url), "shop", SystemClock(), worker="tests", **more)

    def remove(self) -> None:
        self.ask("DELETE", f"vhosts/{self.vhost}")


@pytest.fixture
def host(server: Callable[[str], Handle]) -> Iterator[Host]:
    made = Host(server("rabbitmq"))
    yield made
    made.remove()


class TestRabbitMQ(Served):
    name = "rabbitmq"
    lease = 0.5
    patience = 0.6
    slack = 0.6

    @pytest.fixture(autouse=True)
    def _place(self, host: Host) -> None:
        self.host = host

    async def open(self) -> RabbitBroker:
        return self.host.broker(self.url + self.host.vhost)

    async def reopen(self, broker: RabbitBroker) -> RabbitBroker:
        broker.consuming.abort()
        broker.publishing.abort()
        return self.host.broker()
