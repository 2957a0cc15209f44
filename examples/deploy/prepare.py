"""Keys, records and files for a server and three sites: one folder for each, with what belongs to it and no more.

Usage: python prepare.py FOLDER [HOST:PORT], the server's address as sites reach it (server:9092, as in compose.yaml).
"""

import shutil
import sys
from pathlib import Path

import numpy as np

import sordino as sd
from sordino.engine.federation.certificates import certify

SITE = """\
[site]
name = "{name}"
server = "{server}"
folder = "."                      # ledger, logs and state of this site: all of it in one volume

[data]
path = "records.npz"

[data.schema]
classes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

[budget]
epsilon = {epsilon}
delta = 1e-5
ledger = "ledger.db"

[limits]
methods = ["dp-fedavg", "robust-hdp"]
rounds = 50

[keys]
authority = "keys/ca.crt"
private = "keys/{name}.key"
"""

folder = Path(sys.argv[1])
server = sys.argv[2] if len(sys.argv) > 2 else "server:9092"
budgets = {"north": 1.0, "east": 2.0, "south": 4.0}

# ca.key can make certificates: keep authority/ offline, or delete it. No container sees it.
keys = certify(folder / "authority", list(budgets), [server.rpartition(":")[0]])

place = folder / "server"
(place / "keys" / "sites").mkdir(parents=True, exist_ok=True)
shutil.copy(Path(__file__).with_name("study.toml"), place)
for file in (keys.authority, *keys.server):
    shutil.copy(file, place / "keys")
for name in budgets:
    shutil.copy(keys.public(name), place / "keys" / "sites")

clients = sd.data.load("digits").partition("dirichlet", clients=len(budgets), beta=1.0, seed=0)
for mine, (name, epsilon) in zip(clients.train, budgets.items()):
    place = folder / name
    (place / "keys").mkdir(parents=True, exist_ok=True)
    np.savez(place / "records.npz", x=clients.x[mine], y=clients.y[mine])
    (place / "site.toml").write_text(SITE.format(name=name, server=server, epsilon=epsilon))
    shutil.copy(keys.authority, place / "keys")
    shutil.copy(keys.private(name), place / "keys")  # with its permissions: for its owner alone
