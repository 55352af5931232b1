"""Parts of every section of the configuration: the base class, and the metadata of an option."""

from __future__ import annotations

import msgspec

from penstock.config import units


class Opt(msgspec.Struct, frozen=True):
    """Metadata of one option, in addition to its type and default."""

    kind: units.Kind
    help: str
    example: str = ""  # set if the default is not a good example
    derived: str = ""  # describes a default that depends on another option
    alias: str = ""  # a shorter variable
    secret: bool = False  # masked in all output, and may be given as a file


class Section(msgspec.Struct, frozen=True, kw_only=True):
    pass
