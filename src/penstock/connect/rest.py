"""Client of a Kafka Connect worker's REST interface, with timeouts and size limits.

See `plan` and `apply` for its use.
"""

from __future__ import annotations

import base64
import http.client
import time
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from penstock.errors import ConfigError, PenstockError, Unreachable
from penstock.rules.masking import mask

T = TypeVar("T")
TIMEOUT = 30.0  # seconds for one answer
# Seconds for a validation. The Connect worker itself allows a connector 90 s to check its database.
VALIDATION_TIMEOUT = 100.0
# Seconds in which requests are repeated during a rebalance (status 409).
REBALANCE_TIMEOUT = 60.0
MAX_ANSWER = 32 << 20  # bytes
HINT = (
    "start the Connect worker, or set its address: --url http://connect.example:8083 "
    "(connect.url, PENSTOCK_CONNECT_URL)"
)


class RequestRefused(PenstockError):
    """The Connect worker rejected a request."""

    def __init__(self, message: str, *, status: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class State(msgspec.Struct):
    state: str = "UNASSIGNED"
    worker_id: str = ""
    trace: str = ""
    id: int = -1  # id of the task, or -1 for the connector


class Status(msgspec.Struct):
    connector: State = msgspec.field(default_factory=State)
    tasks: list[State] = msgspec.field(default_factory=list)
    type: str = ""

    def failed(self) -> list[State]:
        return [s for s in (self.connector, *self.tasks) if s.state == "FAILED"]

    def runs(self) -> bool:
        return bool(self.tasks) and all(s.state == "RUNNING" for s in (self.connector, *self.tasks))


class Info(msgspec.Struct):
    config: dict[str, str | None] = msgspec.field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        return {name: value for name, value in self.config.items() if value is not None}


class Known(msgspec.Struct):
    """One connector of the Connect worker."""

    info: Info = msgspec.field(default_factory=Info)
    status: Status = msgspec.field(default_factory=Status)


class _Value(msgspec.Struct):
    name: str = ""
    errors: list[str] = msgspec.field(default_factory=list)


class _Definition(msgspec.Struct):
    name: str = ""
    type: str = ""


class _Checked(msgspec.Struct):
    definition: _Definition
    value: _Value


class Validation(msgspec.Struct):
    configs: list[_Checked] = msgspec.field(default_factory=list)

    def errors(self) -> list[tuple[str, str]]:
        return [
            (c.value.name or c.definition.name, sentence)
            for c in self.configs
            for sentence in c.value.errors
        ]

    def names(self) -> set[str]:
        return {c.definition.name for c in self.configs}

    def secrets(self) -> frozenset[str]:
        return frozenset(c.definition.name for c in self.configs if c.definition.type == "PASSWORD")


class _Plugin(msgspec.Struct, rename={"cls": "class"}):
    cls: str
    version: str | None = None


class _ErrorBody(msgspec.Struct):
    message: str = ""


class Worker:
    """Synchronous client for one command. Retries use the clock `wait` and `now`."""

    def __init__(
        self,
        url: str,
        *,
        wait: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raise ConfigError if `url` is not an http or https address."""
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError:
            parts, self._port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{mask(url)!r} is not an address of a Connect worker",
                hint="http://127.0.0.1:8083",
            )
        self.shown = mask(url)
        self._tls, self._host, self._path = (
            parts.scheme == "https",
            parts.hostname,
            parts.path.rstrip("/"),
        )
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if parts.username:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        self._wait, self._now = wait, now

    # -- reading -----------------------------------------------------------------------------------

    def plugins(self) -> dict[str, str]:
        """Return the versions of the installed connectors, by class."""
        return {
            p.cls: p.version or ""
            for p in self._ask("GET", "/connector-plugins", type=list[_Plugin])
        }

    def connectors(self) -> dict[str, Known]:
        path = "/connectors?expand=info&expand=status"
        return self._ask("GET", path, type=dict[str, Known])

    def status(self, name: str) -> Status:
        return self._ask("GET", f"/connectors/{_quoted(name)}/status", type=Status)

    def validate(self, cls: str, config: Mapping[str, str]) -> Validation:
        path = f"/connector-plugins/{_quoted(cls)}/config/validate"
        return self._ask("PUT", path, config, type=Validation, timeout=VALIDATION_TIMEOUT)

    # -- changes -----------------------------------------------------------------------------------

    def put(self, name: str, config: Mapping[str, str]) -> None:
        path = f"/connectors/{_quoted(name)}/config"
        self._ask("PUT", path, config, type=object, timeout=VALIDATION_TIMEOUT)

    def restart(self, name: str, *, only_failed: bool) -> None:
        self._ask(
            "POST",
            f"/connectors/{_quoted(name)}/restart"
            f"?includeTasks=true&onlyFailed={str(only_failed).lower()}",
            type=object,
        )

    def delete(self, name: str) -> None:
        self._ask("DELETE", f"/connectors/{_quoted(name)}", type=object)

    # -- HTTP --------------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, str] | None = None,
        *,
        type: type[T],
        timeout: float = TIMEOUT,
    ) -> T:
        """Send a request and return the decoded answer, of the given type. Raises PenstockError."""
        until = self._now() + REBALANCE_TIMEOUT
        pause = 0.25
        while True:
            status, raw = self._exchange(method, path, body, timeout)
            if status != 409 or self._now() + pause > until:
                break
            self._wait(pause)  # the Connect cluster is rebalancing
            pause = min(2 * pause, 4.0)
        if not 200 <= status < 300:
            raise self._refusal(status, raw)
        try:
            return msgspec.json.decode(raw or b"null", type=type)
        except msgspec.MsgspecError:
            raise Unreachable(
                f"the server at {self.shown} is not a Kafka Connect worker", hint=HINT
            ) from None

    def _exchange(
        self, method: str, path: str, body: Mapping[str, str] | None, timeout: float
    ) -> tuple[int, bytes]:
        # HTTPSConnection verifies the certificate of the server by default.
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout)
        try:
            connection.request(
                method,
                self._path + path,
                body=None if body is None else msgspec.json.encode(body),
                headers=self._headers,
            )
            answer = connection.getresponse()
            raw = answer.read(MAX_ANSWER + 1)
        except TimeoutError:
            raise Unreachable(
                f"the Connect worker at {self.shown} did not answer within {timeout:.0f} s",
                hint=HINT,
            ) from None
        except (OSError, http.client.HTTPException) as e:
            reason = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
            raise Unreachable(
                f"the Connect worker at {self.shown} cannot be reached: {reason}", hint=HINT
            ) from None
        finally:
            connection.close()
        if len(raw) > MAX_ANSWER:
            raise Unreachable(
                f"the Connect worker at {self.shown} answers with more than {MAX_ANSWER >> 20} MiB",
                hint="check the address",
            )
        return answer.status, raw

    def _refusal(self, status: int, raw: bytes) -> PenstockError:
        try:
            message = msgspec.json.decode(raw, type=_ErrorBody).message
        except msgspec.MsgspecError:
            message = ""
        if status in (401, 403):
            return Unreachable(
                f"the Connect worker at {self.shown} rejects the credentials ({status})",
                hint="--url http://user:password@connect.example:8083",
            )
        if not message:
            return Unreachable(
                f"the server at {self.shown} is not a Kafka Connect worker (status {status})",
                hint=HINT,
            )
        return RequestRefused(
            f"the Connect worker reports: {' '.join(message.split())[:600]}",
            status=status,
            hint="check each option with `penstock connect plan`",
        )


def _quoted(name: str) -> str:
    return quote(name, safe="")
