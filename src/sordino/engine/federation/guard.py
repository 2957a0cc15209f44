"""Flower's app process at a site, which runs sordino's shell and no other code that a server may send.

A SuperNode starts ``flwr-clientapp`` for every message, and that runs whatever app came over the wire. ``write_guard``
puts a command of that name before it on the path; it refuses every bundle whose code is not the shell's, text for text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sordino.engine.federation.shell import is_shell
from sordino.errors import SordinoError


def write_guard(folder: Path) -> Path:
    """A folder to put first on a SuperNode's path."""
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "flwr-clientapp"
    command.write_text(f"#!{sys.executable}\nfrom sordino.engine.federation.guard import main\n\nmain()\n")
    command.chmod(0o700)
    return folder


def main() -> None:
    """Run Flower's own app process with the check put before the installation of any bundle."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    install = runtime.install_from_fab  # another Flower without this name: fail here, and run nothing

    def checked(bundle: Any, *args: Any, **options: Any) -> Any:
        if not (isinstance(bundle, bytes) and is_shell(bundle)):
            raise SordinoError("refused: the app that was sent is not sordino's shell, and no other code runs here")
        return install(bundle, *args, **options)

    runtime.install_from_fab = checked
    flwr_clientapp()
