"""The rig of a broker whose server is one of ours: where it is, how it dies, what stands in front
of it. How a broker is opened, each test file says.
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
    """`open` uses `self.url`, whatever it is at that moment."""

    name: ClassVar[str]  # of the server
    volatile: ClassVar[bool] = (
        False  # it forgets everything when it dies, so its death proves nothing about the broker
    )

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
