"""RabbitMQ's management API, for the one figure that AMQP does not tell: what all workers together
have in flight. It may be seconds old.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from penstock.errors import ConfigError, Unreachable
from penstock.rules.masking import mask

PATIENCE = 5.0  # seconds
EXAMPLE = "?management=http://host:15672"
MOST = 500  # queues of one namespace that are looked at


class _Queue(msgspec.Struct):
    name: str
    messages_unacknowledged: int = 0


class _Page(msgspec.Struct):
    items: list[_Queue]


class Management:
    def __init__(self, url: str, user: str, password: str) -> None:
        """Without a user of its own the URL is asked as the broker's. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            self.port = parts.port
        except ValueError:
            parts, self.port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{mask(url)!r} is not the address of RabbitMQ's management API", hint=EXAMPLE
            )
        self.tls, self.host, self.path = (
            parts.scheme == "https",
            parts.hostname,
            parts.path.rstrip("/"),
        )
        self.user = unquote(parts.username) if parts.username else user
        login = f"{self.user}:{unquote(parts.password) if parts.password else password}"
        self._headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}

    async def unacknowledged(self, vhost: str, namespace: str) -> dict[str, int]:
        """By queue. Raises Unreachable."""
        query = urlencode(
            {
                "page": 1,
                "page_size": MOST,
                "name": namespace + ".",
                "use_regex": "false",
                "columns": "name,messages_unacknowledged",
            }
        )
        body = await asyncio.to_thread(
            self._get, f"{self.path}/api/queues/{quote(vhost, safe='')}?{query}"
        )
        try:
            return {
                queue.name: queue.messages_unacknowledged
                for queue in msgspec.json.decode(body, type=_Page).items
            }
        except msgspec.MsgspecError as e:
            raise Unreachable(
                f"what answers at {self.host} is no RabbitMQ management API", hint=EXAMPLE
            ) from e

    def _get(self, path: str) -> bytes:
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=PATIENCE)
        try:
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as e:
            raise Unreachable(
                f"RabbitMQ's management API at {self.host} cannot be reached: {e}",
                hint="enable its plugin, or correct the address",
            ) from e
        finally:
            connection.close()
        if answer.status in (401, 403):
            raise Unreachable(
                f"RabbitMQ's management API at {self.host} refuses the user {self.user!r}",
                hint="give it the tag `monitoring`",
            )
        if answer.status != 200:
            raise Unreachable(
                f"RabbitMQ's management API at {self.host} answers {answer.status}", hint=EXAMPLE
            )
        return body
