"""Options of every command. They load the configuration and open the stores.

See `penstock.config.schema` for the meaning of each configuration option.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from penstock.cli.hidden import hidden, learn, learn_environment, learn_file
from penstock.cli.output import plain
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.config.files import Loaded
    from penstock.config.schema import Config
    from penstock.config.units import Kind
    from penstock.model import Route
    from penstock.ports import Transaction
    from penstock.runtime.stores import Stores

T = TypeVar("T")
LEVELS = ("debug", "info", "warning", "error")
# Variables of the command line itself, not of the configuration.
CLI_VARIABLES = ("PENSTOCK_DEBUG", "PENSTOCK_LOG_LEVEL")
_COMMON = Group("Common options", sort_key=90)


class SafeFormatter(logging.Formatter):
    """Log formatter that escapes control characters and hides passwords."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(hidden(super().format(record)))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    config: Annotated[
        str | None,
        Parameter(
            group=_COMMON, help="configuration file (else PENSTOCK_CONFIG, else ./penstock.toml)"
        ),
    ] = None
    state: Annotated[
        str | None,
        Parameter(group=_COMMON, help="directory of the embedded stores (else ./.penstock)"),
    ] = None
    overrides: Annotated[
        list[str],
        Parameter(
            name=["--set", "-o"], group=_COMMON, help="set an option: pace.rate=5 (repeatable)"
        ),
    ] = field(default_factory=list)
    log_level: Annotated[
        str | None,
        Parameter(group=_COMMON, help="debug, info, warning or error (logs go to stderr)"),
    ] = None
    debug: Annotated[bool, Parameter(group=_COMMON, help="show tracebacks")] = False

    # -- configuration -----------------------------------------------------------------------------

    def texts(self) -> dict[str, str]:
        """Return the options set on the command line, by path."""
        given: dict[str, str] = {}
        for override in self.overrides:
            path, equals, text = override.partition("=")
            if not equals:
                raise UsageError(f"{override!r} has no `=`", hint="-o pace.rate=5")
            given[path.strip()] = text
        if self.state is not None:
            given["state.dir"] = self.state
        if self.config is not None:
            given["config"] = self.config
        return given

    def load(self) -> Loaded:
        from penstock.config import files as config

        self.start_logging()
        given, environment = self.texts(), dict(os.environ)
        learn(given.values())
        learn_environment(environment)
        learn_file(self.config or environment.get("PENSTOCK_CONFIG") or config.FILE_NAME)
        return config.load(
            given,
            {name: value for name, value in environment.items() if name not in CLI_VARIABLES},
            Path.cwd(),
        )

    def start_logging(self, default: str = "warning") -> None:
        level = (
            self.log_level
            or os.environ.get("PENSTOCK_LOG_LEVEL")
            or ("debug" if self.debug else default)
        ).lower()
        if level not in LEVELS:
            raise UsageError(f"there is no log level {level!r}", hint=", ".join(LEVELS))
        handler = logging.StreamHandler()  # stderr, because stdout is for the command's output
        handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler], level=getattr(logging, level.upper()))

    # -- stores ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stores(self, *, create: bool = False, config: Config | None = None) -> Iterator[Stores]:
        """Open the stores on this thread for one command, and close them at the end.

        Raise an error if the state is missing and `create` is False.
        """
        from penstock.runtime.stores import open_stores

        opened = open_stores(config or self.load().config, create=create, inline=True)
        try:
            yield opened
        finally:
            opened.close()

    def read(self, question: Callable[[Stores, Transaction], T]) -> T:
        """Run one query on the stores, in one snapshot."""
        with self.stores() as stores:
            return ask(stores, lambda tx: question(stores, tx))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CommonWithOutput(Common):
    """Common options of commands in which -o names an output file."""

    overrides: Annotated[
        list[str],
        Parameter(name=["--set"], group=_COMMON, help="set an option: pace.rate=5 (repeatable)"),
    ] = field(default_factory=list)


DEFAULTS, WITH_OUTPUT = Common(), CommonWithOutput()


def ask(stores: Stores, question: Callable[[Transaction], T]) -> T:
    """Run `question` in one snapshot, so that all its statements see the same state."""
    return stores.uow.snapshot(question)


def confirmed(what: str, *, yes: bool, hint: str = "") -> bool:
    """Return True if the operator agrees to the action `what`, such as "delete shop-products".

    Asks on a terminal. Raise UsageError if stdin is not a terminal and --yes is missing.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"this would {what}", hint="--yes to confirm" + hint)
    sys.stderr.write(f"{plain(what[:1].upper() + what[1:])}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def pipeline_file(config: Config, given: str | None, usage: str = "--pipeline FILE") -> str:
    """Return the given pipeline, or else the configured one. Raise UsageError if both are missing.

    `usage` shows how this command takes a pipeline.
    """
    chosen = given or config.pipeline
    if not chosen:
        raise UsageError(
            "no pipeline given",
            hint=f'{usage}, or set pipeline = "shop.py" in penstock.toml '
            "(`penstock init` writes both)",
        )
    learn_file(chosen)
    return chosen


def check_pool(config: Config, name: str | None) -> None:
    """Raise UsageError if a proxy pool is named that is not configured."""
    if name is not None and name not in config.proxies:
        raise UsageError(
            f"there is no proxy pool {name!r}",
            hint=f"pools: {', '.join(config.proxies)}"
            if config.proxies
            else "add a pool with [proxies.NAME] in penstock.toml",
        )


def read_value(option: str, text: str, kind: Kind) -> Any:
    """Return the value of a command-line option. Raise UsageError if it cannot be read."""
    try:
        return kind.read(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is not {kind.expected}") from None


def read_route_options(geo: str | None, pool: str | None, account: str | None) -> Route:
    """Return the route of --geo, --pool and --account.

    Raise UsageError for an empty value: the URL would be fetched without the route.
    """
    from penstock.authoring.routing import WrongValue, read_route

    try:
        return read_route({"geo": geo, "pool": pool, "account": account})
    except WrongValue as e:
        raise UsageError(e.message, hint=e.hint) from None


Json = Annotated[bool, Parameter(name="--json", help="one JSON document on stdout")]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], help="do not ask for confirmation")]
_PIPELINE = "a pipeline, .py or .toml (else `pipeline` of penstock.toml)"
PipelineArgument = Annotated[str | None, Parameter(help=_PIPELINE)]
PipelineFile = Annotated[str | None, Parameter(name=["--pipeline", "-p"], help=_PIPELINE)]
