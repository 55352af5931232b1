"""A pipeline file, in Python or TOML, to its one Pipeline."""

from __future__ import annotations

import hashlib
import sys
import traceback
import types
from pathlib import Path

from penstock.authoring.pipeline import Pipeline
from penstock.errors import ConfigError


def load(path: str | Path) -> Pipeline:
    """The one pipeline of a `.py` or `.toml` file. Raises ConfigError that says where in the file."""
    path = Path(path)
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no pipeline file {path}", hint="`penstock init` writes one to start from"
        ) from None
    except OSError as e:
        raise ConfigError(
            f"cannot read {path}: {e.strerror or e}",
            hint="name a .py or .toml file that you may read",
        ) from None
    if path.suffix == ".toml":
        from penstock.authoring.toml import (
            compile_toml,  # here: it needs the parser, and a Python pipeline's parent never does
        )

        pipeline = compile_toml(source, str(path))
    elif path.suffix == ".py":
        pipeline = _import(path, source)
    else:
        raise ConfigError(
            f"{path} is neither .py nor .toml", hint="a pipeline is a Python file or a TOML file"
        )
    pipeline.check()
    pipeline.path = str(path.resolve())
    return pipeline


def _import(path: Path, source: bytes) -> Pipeline:
    full = str(path.resolve())
    # A name of its own: a user's `json.py` must not become everyone's json, and __name__ ==
    # "__main__" must not hold.
    module = types.ModuleType(
        "_penstock_pipeline_"
        + hashlib.blake2b(full.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    )
    module.__file__ = full
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE` does; stays, for imports inside extractors
    sys.modules[module.__name__] = module  # dataclasses and pydantic look their module up
    try:
        exec(compile(source, full, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  the user's own file, by the user's own command
    except (Exception, SystemExit) as e:
        del sys.modules[module.__name__]
        raise _explained(e, path, full) from None
    found = {name: value for name, value in vars(module).items() if isinstance(value, Pipeline)}
    distinct = list({id(p): p for p in found.values()}.values())
    if len(distinct) != 1:
        del sys.modules[module.__name__]
        listed = ", ".join(f"{name} = Pipeline({p.name!r})" for name, p in found.items()) or "none"
        hint = 'shop = Pipeline("shop"), and one file for each pipeline'
        raise ConfigError(
            f"{path}: a pipeline file has one Pipeline at its top level; found: {listed}", hint=hint
        )
    return distinct[0]


def _explained(error: BaseException, path: Path, full: str) -> ConfigError:
    line = next(
        (
            frame.lineno
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if frame.filename == full
        ),
        None,
    )
    hint = "fix that line; `penstock config check` looks again"
    if isinstance(error, SyntaxError):
        if error.filename == full:
            line = error.lineno
        return ConfigError(f"{path}:{line or '?'}: {type(error).__name__}: {error.msg}", hint=hint)
    if isinstance(error, ConfigError):
        return ConfigError(f"{path}:{line or '?'}: {error.message}", hint=error.hint)
    if isinstance(error, ModuleNotFoundError):
        hint = f"install {error.name} in the environment that runs penstock"
    last = traceback.format_exception_only(error)[-1].strip()
    return ConfigError(f"{path}:{line or '?'}: {last}", hint=hint)
