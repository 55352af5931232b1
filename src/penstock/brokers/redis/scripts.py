"""Lua scripts of the Redis broker. Every change to a topic is one script, so it is atomic.

The Lua code is in the folder `lua`. Each script starts with `common.lua`.

All keys have one hash tag, `{shop.requests}` for topic `requests` of namespace `shop`. The dead
letters have `{shop.requests}.dead`:

    BASE                    hash: the topic's settings
    BASE:high|normal|low    streams, with one consumer group per group. Entries in the pending list
                            of a group are in flight
    BASE:GROUP              hash: the group's counters
    BASE:GROUP:CLASS:live   sorted set: entries that are read and not settled, by time
    BASE:GROUP:CLASS:keys   sorted set: keys with entries, by the time at which they may be served
                            or were last served. +inf: ordered topic, and the key has an entry in
                            flight
    BASE:GROUP:CLASS:k:KEY  list: ready entries of a key
    BASE:GROUP:CLASS:due    sorted set: delayed entries, by due time
    BASE:GROUP:CLASS:out    hash: entry -> token and key of its delivery in flight
    BASE:GROUP:CLASS:n      hash: entry -> deliveries so far, for entries that are not in flight

A stream delivers its entries in order, so one busy host would block all others. So new entries are
read in advance (NOACK) and sorted by key. XCLAIM with FORCE puts delivered entries into the pending
list of the consumer, and XAUTOCLAIM finds entries of crashed consumers.
"""

from __future__ import annotations

from importlib.resources import files

from penstock.stores.redis import Script

_FOLDER = files(__package__) / "lua"


def _script(*names: str, allow_oom: bool = True) -> Script:
    """Join these files. With `allow_oom` the script also runs on a server that is full."""
    head = "#!lua flags=allow-oom\n" if allow_oom else "#!lua\n"
    parts = [(_FOLDER / f"{name}.lua").read_text("utf-8") for name in ("common", *names)]
    return Script(head + "".join("\n" + part for part in parts))


ENSURE = _script("ensure", allow_oom=False)
PUBLISH = _script("publish", allow_oom=False)
RECEIVE = _script("receive")  # allow_oom, so that a full server can be drained
SETTLE = _script("fenced", "settle")
EXTEND = _script("fenced", "extend")
HOLD = _script("hold")
LEAVE = _script("leave")
STATS = _script("stats")
PEEK = _script("peek")
PURGE = _script("purge")
REPLAY = _script("replay", allow_oom=False)
