"""The app that the SuperLink runs: a shell that starts the coordinator which is installed at the server.

Flower wants an app to have a half for sites too. This one is empty, and no site fetches it (``worker``).
"""

from __future__ import annotations

from pathlib import Path

PROJECT = """\
[project]
name = "sordino-shell"
version = "1.0.0"
description = "Starts the coordinator that is installed here."
license = { text = "Apache-2.0" }
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "sordino"

[tool.flwr.app.components]
serverapp = "sordino_shell.server:app"
clientapp = "sordino_shell.client:app"

[tool.flwr.app.config]
run = ""
"""

CLIENT = '''\
"""Empty: no app runs at a site."""

from flwr.clientapp import ClientApp

app = ClientApp()
'''

SERVER = '''\
"""Starts the coordinator that is installed at the server."""

from flwr.serverapp import ServerApp

from sordino.study.serve import coordinate

app = ServerApp()
app.main()(coordinate)
'''

FILES = {
    "pyproject.toml": PROJECT,
    "sordino_shell/__init__.py": "",
    "sordino_shell/client.py": CLIENT,
    "sordino_shell/server.py": SERVER,
}


def write_shell(folder: Path) -> Path:
    """Write the app where ``flwr run`` can find it."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
