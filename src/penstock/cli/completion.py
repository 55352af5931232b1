"""`penstock completion …`: shell completion, printed or put where the shell finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from penstock.cli.output import (
    say,
)
from penstock.errors import UsageError

app = App(name="completion", help="completion for bash, zsh and fish")
Shell = Annotated[
    Literal["bash", "zsh", "fish"] | None, Parameter(help="which shell (else the one you use)")
]


@app.command
def show(shell: Shell = None, /) -> int:
    """Print the script: `penstock completion show bash > FILE`."""
    from penstock.cli.main import build

    print(build().generate_completion(prog_name="penstock", shell=shell or _current()))
    return 0


@app.command
def install(
    shell: Shell = None,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="where to (else where the shell looks)"),
    ] = None,
) -> int:
    """Write the script where the shell looks for it; your start-up files are not touched."""
    from penstock.cli.main import build

    chosen = shell or _current()
    path = build().install_completion(shell=chosen, output=output, add_to_startup=False)
    say(f"completion for {chosen} is in {path}")
    if chosen == "zsh":
        say(
            f"zsh finds it if its directory is in fpath: fpath=({Path(path).parent} $fpath), before compinit in ~/.zshrc"
        )
    else:
        say("it works in the next shell you open")
    return 0


def _current() -> Literal["bash", "zsh", "fish"]:
    import os

    name = Path(os.environ.get("SHELL", "")).name
    if name == "bash" or name == "zsh" or name == "fish":
        return name  # type: ignore[return-value]  # the three literals
    raise UsageError("which shell?", hint="bash, zsh or fish")
