"""Flower's app process at a site, which runs sordino's shell and no other code that a server may send.

A SuperNode starts ``flwr-clientapp`` for every message, and that runs whatever app came over the wire. ``write_guard``
puts a command of that name before it on the path; it refuses every bundle whose code is not the shell's, text for text.

Loading Flower takes longer than carrying a packet, so a *starter* loads it once and forks a process for each message;
the command only tells it to. Without a starter the command does the work itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from sordino.engine.federation.shell import is_shell
from sordino.errors import SordinoError

COMMAND = """\
#!{python}
import json, socket, sys

try:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect({starter!r})
        line.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
        taken = line.recv(1) == b"+"
except OSError:
    taken = False
if not taken:
    from sordino.engine.federation.guard import main

    main()
"""


def write_guard(folder: Path, starter: Path) -> Path:
    """A folder to put first on a SuperNode's path."""
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "flwr-clientapp"
    command.write_text(COMMAND.format(python=sys.executable, starter=str(starter)))
    command.chmod(0o700)
    return folder


def main() -> None:
    """Run Flower's own app process with the check put before the installation of any bundle."""
    _guarded()()


def _guarded() -> Any:
    """Flower's command, which now installs nothing but the shell."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    install = runtime.install_from_fab  # another Flower without this name: fail here, and run nothing

    def checked(bundle: Any, *args: Any, **options: Any) -> Any:
        if not (isinstance(bundle, bytes) and is_shell(bundle)):
            raise SordinoError("refused: the app that was sent is not sordino's shell, and no other code runs here")
        return install(bundle, *args, **options)

    runtime.install_from_fab = checked
    return flwr_clientapp


def start_processes(door: Path) -> None:
    """Fork a guarded process for every line of arguments that comes through ``door``; until the end of the site."""
    run = _guarded()
    import flwr.clientapp  # noqa: F401  what the shell needs, loaded once for all

    import sordino.engine.federation.door  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: Flower hears of failures by itself
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(door))
        listening.listen(16)
        while True:
            line, _ = listening.accept()
            with line, contextlib.suppress(OSError, json.JSONDecodeError):
                line.settimeout(5.0)
                arguments = json.loads(line.makefile().readline())
                if os.fork() == 0:
                    listening.close()
                    line.sendall(b"+")
                    line.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    sys.argv = ["flwr-clientapp", *map(str, arguments)]
                    run()
                    os._exit(0)


if __name__ == "__main__":
    start_processes(Path(sys.argv[1]))
