"""The whole thing over a real network: SuperLink and SuperNodes as processes, TLS, node authentication."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from federation_network import EPSILONS, NAMES, Network
from federation_rig import simulated, table
from federation_spy import check_wire

import sordino as sd
from sordino.engine.federation.certificates import Keys, certify
from sordino.errors import SordinoError
from sordino.privacy.ledger import Charge, Ledger, Plan
from sordino.privacy.types import Budget
from sordino.study.deploy import prepare
from sordino.study.file import make_study
from sordino.study.join import join
from sordino.study.status import look

STEPS = {"steps": 2, "rate": 0.2, "lr": 0.3}
TOTALS = {"anna": 200.0, "bert": 200.0, "cleo": 16.0}


def five_rounds(network: Network) -> dict:
    return table("dp-fedavg", network.clients, rounds=5, steps=10, rate=0.3, lr=4.0)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory):
    """Three sites; Cleo declared the first study's turns in an earlier life and broke off after two: three are left.

    They have the rate and noise that were declared before anything was released, so they need no filter.
    """
    laid = Network.lay(tmp_path_factory.mktemp("federation"), TOTALS)
    facts = {
        name: {"records": len(mine), "epsilon": epsilon, "delta": 1e-5, "adjacency": "zero-out"}
        for name, mine, epsilon in zip(NAMES, laid.clients.train, EPSILONS)
    }
    turn = prepare(make_study(five_rounds(laid)), "").plan(facts).clients[2].terms.event
    with Ledger(laid.folder / "cleo.db") as book:
        book.open_account("cleo", Budget(16.0, 1e-5))
        assert book.declare([Plan("cleo", "earlier", (turn,), 5)]) == {"cleo": 5}
        book.charge([Charge("cleo", "earlier", f"round {n}", "gradient", turn.count, "then") for n in range(2)])
        book.close_plan("cleo", "earlier")
    with laid:
        yield laid


@pytest.fixture(scope="module")
def five(network: Network):
    """Five rounds with secret generators; afterwards Cleo's officer grants more."""
    result, folder = network.run(five_rounds(network))
    with Ledger(network.folder / "cleo.db") as book:
        book.top_up("cleo", 200.0, "further studies", "the officer")
    return result, folder


def test_a_site_with_budget_for_three_rounds_of_five_stops_and_the_others_finish(network: Network, five):
    result, folder = five
    took_part = [name for record in result["rounds"] for name in record["participants"]]
    assert {name: took_part.count(name) for name in NAMES} == {"anna": 5, "bert": 5, "cleo": 3}
    seen = {one["site"]: one for one in look(folder)["sites"]}
    assert seen["cleo"]["payable"] == 3
    assert seen["cleo"]["refused"] == ["its budget for this run was used up before round 4"]
    spent = {one["client"]: one for one in result["privacy"]}
    assert spent["cleo"]["spent_epsilon"] <= 16.0
    assert spent["anna"]["told_by"] == "site"
    assert spent["anna"]["run_epsilon"] == pytest.approx(4.0, rel=0.02)
    assert result["simulated"] is False


def test_secret_generators_train_a_sensible_model(network: Network, five):
    model = sd.load(five[1]).model
    with torch.no_grad():
        right = (model(torch.from_numpy(network.clients.x)).argmax(-1).numpy() == network.clients.y).mean()
    assert right > 0.8


@pytest.mark.parametrize(
    ("method", "trust"),
    [
        ("dp-fedavg", {}),
        ("robust-hdp", {}),
        pytest.param("fedfdp", {}, marks=pytest.mark.slow),  # its questions are adaptdp's, over the same wire
        ("adaptdp", {}),
        ("dp-fedavg", {"noise": "shared", "colluders": 1}),
        pytest.param("adaptdp", {"noise": "shared", "dropouts": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_network_trains_to_the_weights_of_the_simulation(
    network: Network, five, method: str, trust: dict, tmp_path: Path
):
    study = table(method, network.clients, rounds=2, **(STEPS | ({"steps": 1} if trust else {}))) | {"trust": trust}
    alone = simulated(network.clients, study, tmp_path / "alone")
    network.foresee(alone.key)
    result, folder = network.run(study)
    assert [len(record["participants"]) for record in result["rounds"]] == [3, 3]
    torch.testing.assert_close(sd.load(folder).weights, alone.weights, atol=1e-5, rtol=0)
    with Ledger(network.folder / "anna.db", readonly=True) as book:
        assert "injected" in book.account("anna").not_private[0]


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_was_sent_had_been_charged(network: Network, five, name: str):
    assert check_wire(network.sent(name), network.folder / f"{name}.db") >= 3


def test_an_unknown_key_is_turned_away_with_a_reason(network: Network, tmp_path: Path):
    stranger = certify(tmp_path / "other", ["anna"])
    with pytest.raises(SordinoError, match="does not know this site's key"):
        join(site_with(network, tmp_path, network.keys.authority, stranger.private("anna")), wait=5, stranger=4)


def test_another_authoritys_server_is_not_trusted(network: Network, tmp_path: Path):
    other = certify(tmp_path / "other", ["anna"])
    with pytest.raises(SordinoError, match=r"is not trusted: .*ca\.crt must be the authority"):
        join(site_with(network, tmp_path, other.authority, network.keys.private("anna")), wait=5)


def test_an_expired_certificate_is_not_trusted(network: Network, tmp_path: Path):
    old = certify(tmp_path / "old", ["anna"], days=-1)
    with _server(old) as port, pytest.raises(SordinoError, match="certificate has expired"):
        join(site_with(network, tmp_path, old.authority, old.private("anna"), port), wait=5)


def site_with(network: Network, folder: Path, authority: Path, private: Path, port: int | None = None) -> Path:
    """Anna's file with other keys, and a ledger of its own."""
    text = (network.folder / "anna.toml").read_text()
    text = text.replace('"keys/ca.crt"', f'"{authority}"').replace('"keys/sites/anna.key"', f'"{private}"')
    text = text.replace('[trust]\npeers = "keys/sites"\n', "")
    text = text.replace('"anna.npz"', f'"{network.folder / "anna.npz"}"')
    if port is not None:
        text = text.replace(f":{network.link.port}", f":{port}")
    path = folder / "anna.toml"
    path.write_text(text)
    return path


@contextlib.contextmanager
def _server(keys: Keys):
    """Somebody who shows a certificate to whoever asks."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*keys.server)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def show() -> None:
            with contextlib.suppress(OSError):
                line, _ = listening.accept()
                context.wrap_socket(line, server_side=True)

        threading.Thread(target=show, daemon=True).start()
        yield listening.getsockname()[1]
