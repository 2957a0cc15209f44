"""Four sites on one machine: a file of digits, a SITE.toml and a schema for each, in the folder ``federation``."""

from pathlib import Path

import numpy as np

import sordino as sd

SITE = """\
[site]
name = "{name}"
server = "127.0.0.1:9092"
folder = "{name}"                 # ledger, logs and state of this site

[data]
path = "{name}/records.npz"

[data.schema]
task = "classification"
classes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

[budget]
epsilon = {epsilon}
delta = 1e-5
ledger = "{name}/ledger.db"

[limits]
methods = ["auto", "dp-fedavg", "robust-hdp", "factor-hdp", "fedfdp", "adaptdp"]
rounds = 50
least_noise = 0.3
clip = [0.01, 10.0]

[keys]
authority = "keys/ca.crt"
private = "keys/sites/{name}.key"
"""

folder = Path("federation")
names = ["north", "east", "south", "west"]
clients = sd.data.load("digits").partition("dirichlet", clients=4, beta=1.0, seed=0)
folder.mkdir(exist_ok=True)
test = np.concatenate(clients.test)  # records that the server may see, to judge the model by
np.savez(folder / "test.npz", x=clients.x[test], y=clients.y[test])
for place, (name, epsilon) in enumerate(zip(names, [1.0, 2.0, 4.0, 8.0])):
    (folder / name).mkdir(parents=True, exist_ok=True)
    mine = clients.train[place]
    np.savez(folder / name / "records.npz", x=clients.x[mine], y=clients.y[mine])
    (folder / f"{name}.toml").write_text(SITE.format(name=name, epsilon=epsilon))
