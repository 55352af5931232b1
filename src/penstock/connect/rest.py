"""The REST interface of a Kafka Connect worker: asked where the configuration says, with time-outs
and caps. What is to be done with it is elsewhere.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from penstock.errors import ConfigError, PenstockError, Unreachable
from penstock.rules.masking import mask

PATIENCE = 30.0  # seconds for one answer
VALIDATING = 100.0  # the worker itself gives a connector ninety seconds to look at its database
REBALANCING = 60.0  # seconds during which "a rebalance is in process" is asked again
LARGEST = 32 << 20  # bytes of an answer
HINT = "start the worker, or name it: --url http://connect.example:8083 (connect.url, PENSTOCK_CONNECT_URL)"


class Refused(PenstockError):
    """The worker understood, and says no."""

    def __init__(self, message: str, *, status: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class State(msgspec.Struct):
    state: str = "UNASSIGNED"
    worker_id: str = ""
    trace: str = ""
    id: int = -1  # of a task


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
    """One connector as the worker has it."""

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


class _Said(msgspec.Struct):
    message: str = ""


class Worker:
    """Synchronous: one command, a few questions. `wait` and `now` are the clock that retries go by."""

    def __init__(
        self,
        url: str,
        *,
        wait: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for what is no address."""
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError:
            parts, self._port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{mask(url)!r} is no address of a Connect worker", hint="http://127.0.0.1:8083"
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

    # -- questions ---------------------------------------------------------------------------------

    def plugins(self) -> dict[str, str]:
        """Class → version of the connectors that are installed."""
        return {
            p.cls: p.version or ""
            for p in self._ask("GET", "/connector-plugins", type=list[_Plugin])
        }

    def connectors(self) -> dict[str, Known]:
        found: dict[str, Known] = self._ask(
            "GET", "/connectors?expand=info&expand=status", type=dict[str, Known]
        )
        return found

    def status(self, name: str) -> Status:
        found: Status = self._ask("GET", f"/connectors/{_quoted(name)}/status", type=Status)
        return found

    def validate(self, cls: str, config: Mapping[str, str]) -> Validation:
        path = f"/connector-plugins/{_quoted(cls)}/config/validate"
        found: Validation = self._ask(
            "PUT", path, dict(config), type=Validation, patience=VALIDATING
        )
        return found

    # -- changes -----------------------------------------------------------------------------------

    def put(self, name: str, config: Mapping[str, str]) -> None:
        self._ask("PUT", f"/connectors/{_quoted(name)}/config", dict(config), patience=VALIDATING)

    def restart(self, name: str, *, only_failed: bool) -> None:
        self._ask(
            "POST",
            f"/connectors/{_quoted(name)}/restart?includeTasks=true&onlyFailed={str(only_failed).lower()}",
        )

    def delete(self, name: str) -> None:
        self._ask("DELETE", f"/connectors/{_quoted(name)}")

    # -- the wire ----------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        type: Any = Any,
        patience: float = PATIENCE,
    ) -> Any:
        until = self._now() + REBALANCING
        pause = 0.25
        while True:
            status, raw = self._exchange(method, path, body, patience)
            if status != 409 or self._now() + pause > until:
                break
            self._wait(pause)  # workers are agreeing on who runs what
            pause = min(2 * pause, 4.0)
        if not 200 <= status < 300:
            raise self._refusal(status, raw)
        if not raw:
            return None
        try:
            return msgspec.json.decode(raw, type=type)
        except msgspec.MsgspecError:
            raise Unreachable(
                f"what answers at {self.shown} is no Kafka Connect worker", hint=HINT
            ) from None

    def _exchange(self, method: str, path: str, body: Any, patience: float) -> tuple[int, bytes]:
        if self._tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=patience, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=patience)
        try:
            connection.request(
                method,
                self._path + path,
                body=None if body is None else msgspec.json.encode(body),
                headers=self._headers,
            )
            answer = connection.getresponse()
            raw = answer.read(LARGEST + 1)
        except TimeoutError:
            raise Unreachable(
                f"the Connect worker at {self.shown} did not answer within {patience:.0f} s",
                hint=HINT,
            ) from None
        except (OSError, http.client.HTTPException) as e:
            reason = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
            raise Unreachable(
                f"the Connect worker at {self.shown} cannot be reached: {reason}", hint=HINT
            ) from None
        finally:
            connection.close()
        if len(raw) > LARGEST:
            raise Unreachable(
                f"the Connect worker at {self.shown} answers with more than {LARGEST >> 20} MiB",
                hint="is it one?",
            )
        return answer.status, raw

    def _refusal(self, status: int, raw: bytes) -> PenstockError:
        try:
            said = msgspec.json.decode(raw, type=_Said).message
        except msgspec.MsgspecError:
            said = ""
        if status in (401, 403):
            return Unreachable(
                f"the Connect worker at {self.shown} refuses us ({status})",
                hint="--url http://user:password@connect.example:8083",
            )
        if not said:
            return Unreachable(
                f"what answers at {self.shown} is no Kafka Connect worker (status {status})",
                hint=HINT,
            )
        return Refused(
            f"the Connect worker says: {' '.join(said.split())[:600]}",
            status=status,
            hint="penstock connect plan checks each option",
        )


def _quoted(name: str) -> str:
    return quote(name, safe="")
