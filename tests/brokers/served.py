"""Conformance rig of a broker on a test server: its URL, its restart, and a proxy before it.

Each test file defines how its broker is opened.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import ClassVar

import pytest
from tests.servers import Handle

from penstock.ports import Broker
from penstock.testing.conformance import BrokerConformance
from penstock.testing.proxy import Proxy


class Served(BrokerConformance):
    """Base of the conformance classes. `open` uses the current `self.url`."""

    name: ClassVar[str]  # name of the server
    # A killed server loses all data, so a kill proves nothing about the broker.
    volatile: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _its_server(self, server: Callable[[str], Handle]) -> None:
        self.served = server(self.name)
        self.url = self.served.url

    async def stop_server(self) -> None:
        if self.volatile:
            await super().stop_server()
        await asyncio.to_thread(self.served.kill)

    async def start_server(self) -> None:
        await asyncio.to_thread(self.served.start)

    def in_front(self) -> Proxy:
        if self.name == "kafka":
            return Proxy(
                "127.0.0.1", self.served.ports("behind"), listen=self.served.ports("proxied")
            )
        return Proxy("127.0.0.1", self.served.port)

    async def open_through(self, proxy: Proxy) -> Broker:
        self.url = re.sub(rf":{self.served.port}\b", f":{proxy.port}", self.served.url)
        return await self.open()
