"""`penstock completion …`: prints or installs the shell completion script."""

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
    Literal["bash", "zsh", "fish"] | None, Parameter(help="shell (else the one of $SHELL)")
]


@app.command
def show(shell: Shell = None, /) -> None:
    """Print the completion script: `penstock completion show bash > FILE`."""
    from penstock.cli.main import build

    print(build().generate_completion(prog_name="penstock", shell=shell or _current()))


@app.command
def install(
    shell: Shell = None,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="file to write (else where the shell looks)"),
    ] = None,
) -> None:
    """Write the script where the shell looks for it. Your start-up files are not changed."""
    from penstock.cli.main import build

    chosen = shell or _current()
    path = build().install_completion(shell=chosen, output=output, add_to_startup=False)
    say(f"completion for {chosen} is in {path}")
    if chosen == "zsh":
        say(
            "zsh finds the file if its directory is in fpath: "
            f"add fpath=({Path(path).parent} $fpath) before compinit in ~/.zshrc"
        )
    else:
        say("completion works in the next shell you open")


def _current() -> Literal["bash", "zsh", "fish"]:
    import os

    name = Path(os.environ.get("SHELL", "")).name
    if name == "bash" or name == "zsh" or name == "fish":
        return name  # type: ignore[return-value]  # the three literals
    raise UsageError("no shell given, and $SHELL is not a supported one", hint="bash, zsh or fish")
