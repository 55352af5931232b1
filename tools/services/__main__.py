"""Command line of `./dev services`. See `control` for the actions."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from .control import closure, down, status, up
from .servers import SERVERS, servers
from .state import state_directory
from .trouble import ServiceError, say

USAGE = f"""Usage: ./dev services up|down|restart|kill [NAME…]
       ./dev services status [NAME…] [--json]
       ./dev services url NAME

  up       install if necessary, start, and wait until it answers (without a name: all of them)
  down     stop servers that `up` started. --wipe also removes their data (without a name: all)
  restart  down, then up
  kill     SIGKILL, as a fault
  status   name, state, URL, pid, version
  url      the URL to give to Penstock

Names: {", ".join(SERVERS)}.
State, logs and data are in .services (or in --state DIR or PENSTOCK_SERVICES_DIR=DIR).
Each directory is a separate set of servers.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ServiceError(f"services: {message}", "./dev services --help", status=2)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False)
    parser.add_argument("action", nargs="?", default="status")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--state")
    parser.add_argument("--wipe", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_intermixed_args(arguments)
    if asked.action not in ("up", "down", "restart", "kill", "status", "url"):
        raise ServiceError(
            f"services: unknown action {asked.action!r}",
            "./dev services up|down|restart|kill|status|url [NAME]",
            status=2,
        )
    unknown = [name for name in asked.names if name not in SERVERS]
    if unknown:
        raise ServiceError(
            f"no service is called {unknown[0]!r}", f"use one of {', '.join(SERVERS)}", status=2
        )
    if asked.action in ("restart", "kill", "url") and not asked.names:
        raise ServiceError(
            f"services {asked.action}: which one?",
            f"./dev services {asked.action} {next(iter(SERVERS))}",
            status=2,
        )
    return asked


def run(arguments: list[str]) -> None:
    asked = _parse(arguments)
    everything = servers(state_directory(asked.state))
    chosen = [
        server for server in everything.values() if server.name in asked.names or not asked.names
    ]
    match asked.action:
        case "up":
            for server in closure([server.name for server in chosen], everything):
                if not up(server):
                    say(f"{server.name} is already running")
        case "down" | "kill":
            for server in reversed(chosen):
                if down(server, kill=asked.action == "kill", wipe=asked.wipe):
                    say(
                        f"{server.name} is stopped"
                        if asked.action == "down"
                        else f"{server.name} is killed"
                    )
                elif asked.names:
                    say(f"{server.name} is not running")
        case "restart":
            for server in reversed(chosen):
                down(server)
            for server in closure([server.name for server in chosen], everything):
                up(server)
        case "url":
            for server in chosen:
                print(server.url())
        case _:
            found = status(chosen)
            if asked.json:
                print(json.dumps([asdict(line) for line in found], indent=2))
                return
            for line in found:
                print(
                    f"{line.name:<9} {line.state:<14} {line.pid or '-':<8} "
                    f"{line.version or '-':<12} {line.url or '-'}"
                )


def main() -> int:
    if {"-h", "--help", "help"} & set(sys.argv[1:]):
        print(USAGE, end="")
        return 0
    try:
        run(sys.argv[1:])
    except ServiceError as error:
        print(f"Error: {error.message}\nTry: {error.hint}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
