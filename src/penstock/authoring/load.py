"""Loads the pipeline of a Python or TOML file."""

from __future__ import annotations

import hashlib
import sys
import traceback
import types
from pathlib import Path

from penstock.authoring.checks import check_names, check_outputs
from penstock.authoring.own_files import hash_files
from penstock.authoring.pipeline import Pipeline
from penstock.errors import ConfigError


def load(path: str | Path) -> Pipeline:
    """Load the pipeline of a `.py` or `.toml` file. Raise ConfigError with the line in the file.

    A sink may still be missing, so that a new extractor can be tried.
    """
    path = Path(path)
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no pipeline file {path}", hint="run `penstock init` to create one"
        ) from None
    except OSError as e:
        raise ConfigError(
            f"cannot read {path}: {e.strerror or e}",
            hint="name a .py or .toml file that you can read",
        ) from None
    if path.suffix == ".toml":
        # Imported here, because it imports the parser, which a Python pipeline does not need here.
        from penstock.authoring.toml import compile_toml

        pipeline = compile_toml(source, str(path))
    elif path.suffix == ".py":
        pipeline = _import(path, source)
    else:
        raise ConfigError(
            f"{path} is neither .py nor .toml", hint="name a Python file or a TOML file"
        )
    check_names(pipeline, path)
    pipeline.path = str(path.resolve())
    pipeline.files_hash = hash_files(path, source)
    if pipeline.sinks or pipeline.hooks:
        pipeline.untaken = frozenset(
            e.name for e in pipeline.extractors if not pipeline.takes(e.name)
        )
    return pipeline


def load_to_run(path: str | Path) -> Pipeline:
    """Load a pipeline as `load` does. Raise ConfigError also if its records would be dropped."""
    pipeline = load(path)
    check_outputs(pipeline, Path(path))
    return pipeline


def _import(path: Path, source: bytes) -> Pipeline:
    full = str(path.resolve())
    # A unique module name: a user's `json.py` must not replace the module json, and __name__ ==
    # "__main__" must not be true.
    module = types.ModuleType(
        "_penstock_pipeline_"
        + hashlib.blake2b(full.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    )
    module.__file__ = full
    if (folder := str(path.resolve().parent)) not in sys.path:
        # As `python FILE` does. It stays there for imports inside extractors.
        sys.path.insert(0, folder)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look up their module
    try:
        # The user's own file, run by the user's own command.
        exec(compile(source, full, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    except (Exception, SystemExit) as e:
        del sys.modules[module.__name__]
        raise _load_error(e, path, full) from None
    found = {name: value for name, value in vars(module).items() if isinstance(value, Pipeline)}
    distinct = list({id(p): p for p in found.values()}.values())
    if len(distinct) != 1:
        del sys.modules[module.__name__]
        listed = ", ".join(f"{name} = Pipeline({p.name!r})" for name, p in found.items()) or "none"
        raise ConfigError(
            f"{path}: a pipeline file needs exactly one Pipeline at its top level, found: {listed}",
            hint='write shop = Pipeline("shop"), and use one file for each pipeline',
        )
    return distinct[0]


def _load_error(error: BaseException, path: Path, full: str) -> ConfigError:
    line = next(
        (
            frame.lineno
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if frame.filename == full
        ),
        None,
    )
    hint = "fix that line, then run `penstock config check`"
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
