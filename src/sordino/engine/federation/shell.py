"""The app that travels over Flower: a shell without a method, a model or a study in it.

At a site it hands a packet to the sordino that is installed there; at the server it starts the one installed there. It
is the same for every study, so a site runs this text and no other (``guard``).
"""

from __future__ import annotations

import io
import tomllib
import zipfile
from pathlib import Path

PROJECT = """\
[project]
name = "sordino-shell"
version = "1.0.0"
description = "Hands packets to the sordino that is installed here."
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
"""Hands every packet to the site's own process."""

from flwr.clientapp import ClientApp

from sordino.engine.federation.door import forward

app = ClientApp()
app.train()(forward)
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


def is_shell(bundle: bytes) -> bool:
    """Whether the code in an app bundle is exactly this shell's: its modules, its entry points, nothing beside them."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            names = archive.namelist()
            texts = {name: archive.read(name).decode() for name in names if not name.startswith(".info/")}
        about = tomllib.loads(texts.pop("pyproject.toml"))["tool"]["flwr"]["app"]["components"]
    except (zipfile.BadZipFile, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError):
        return False
    if len(set(names)) != len(names) or any(".." in name for name in names):
        return False  # one name twice, or a way out of the folder: whoever unpacks it may see something else
    code = {name: text for name, text in FILES.items() if name != "pyproject.toml"}
    entry_points = tomllib.loads(PROJECT)["tool"]["flwr"]["app"]["components"]
    return bool(about == entry_points) and texts == code
