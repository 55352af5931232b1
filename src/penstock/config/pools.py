"""Names of the configured proxy pools, and checks of each pool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.config.options import suggest
from penstock.config.schema import POOL, PREFIX, ProxyPoolConfig, pool_options
from penstock.errors import ConfigError


def pool_names(
    document: Mapping[str, Any], env: Mapping[str, str], cli: Mapping[str, str], shown: str
) -> list[str]:
    """Return the names of all pools, from file, command line and variables.

    A variable has `_` for `-`, so it may belong to a pool whose name contains `-`.
    """
    tables = document.get(POOL, {})
    if not isinstance(tables, dict):
        raise ConfigError(
            f"{POOL}: is a section of {shown}, not a value",
            hint=f'[{POOL}.main] urls = ["http://user:password@proxy.example:8080"]',
        )
    names = list(tables)
    names += [
        path.split(".")[1] for path in cli if path.startswith(POOL + ".") and path.count(".") == 2
    ]
    start = PREFIX + POOL.upper() + "_"
    ends = tuple(
        sorted(
            {"_" + option.path.rpartition(".")[2].upper() for option in pool_options("x")},
            key=len,
            reverse=True,
        )
    )
    known = {name.upper().replace("-", "_") for name in names}
    for variable in sorted(env):
        text = variable.removesuffix("_FILE")
        end = next(
            (
                end
                for end in ends
                if variable.startswith(start) and text.endswith(end) and env[variable]
            ),
            None,
        )
        if end is not None and (name := text[len(start) : -len(end)]) and name not in known:
            known.add(name)
            names.append(name.lower())
    names = list(dict.fromkeys(names))
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name):
            raise ConfigError(
                f"{POOL}.{name}: is not a valid pool name", hint="letters, digits, _ and -"
            )
        if not isinstance(tables.get(name, {}), dict):
            raise ConfigError(
                f"{POOL}.{name}: is a section of {shown}, not a value",
                hint=f"[{POOL}.{name}] urls = …",
            )
    for variable in {name.upper().replace("-", "_") for name in names}:
        if len(same := [name for name in names if name.upper().replace("-", "_") == variable]) > 1:
            raise ConfigError(
                f"{POOL}: {' and '.join(same)} would have the same variables",
                hint="rename one of them",
            )
    return names


def check_pools(pools: Mapping[str, ProxyPoolConfig]) -> None:
    for name, pool in pools.items():
        if not pool.urls and not pool.list_url:
            raise ConfigError(
                f"{POOL}.{name}: has neither urls nor list_url",
                hint='urls = ["http://user:password@proxy.example:8080"]',
            )
        if pool.next and pool.next not in pools:
            raise ConfigError(
                f"{POOL}.{name}.next: there is no pool {pool.next!r}",
                hint=suggest(pool.next, pools, f"the pools are: {', '.join(pools)}"),
            )
