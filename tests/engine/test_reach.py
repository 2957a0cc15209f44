"""The way from a site to its server: what is wrong with it, said once, with the reason and since when."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from sordino.engine.federation.certificates import Keys, certify
from sordino.engine.federation.front import Front
from sordino.engine.federation.node import Address
from sordino.engine.federation.processes import free_port
from sordino.engine.federation.reach import Away, Line, certificate_of, knows, meet, trouble
from sordino.engine.federation.signing import load_private
from sordino.errors import SordinoError

FAILED = "WARNING :    Connection attempt failed, retrying in 1.41 seconds\n"
BACK = "INFO :      Connection successful after 9.30 seconds and 4 tries.\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return certify(tmp_path_factory.mktemp("keys"), ["north"])


@contextlib.contextmanager
def server(keys: Keys | None, port: int = 0, host: str = "127.0.0.1"):
    """Somebody who takes connections, and shows a certificate where there are keys."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if keys is not None:
        context.load_cert_chain(*keys.server)
    with socket.create_server((host, port)) as listening:

        def show() -> None:
            while True:
                try:
                    line, _ = listening.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), line:
                    if keys is None:
                        line.sendall(b"220 mail\r\n")
                    else:
                        context.wrap_socket(line, server_side=True).close()

        threading.Thread(target=show, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def at(port: int, keys: Keys, host: str = "127.0.0.1") -> Address:
    return Address(host, port, keys.authority, keys.private("north"))


def test_a_server_that_is_trusted(keys: Keys):
    with server(keys) as port:
        assert trouble(at(port, keys)) is None
        assert "notAfter" in certificate_of(at(port, keys))
        assert certificate_of(Address("127.0.0.1", port, None, None)) == {}


def test_nobody_answers(keys: Keys):
    with pytest.raises(Away, match="connection refused"):
        certificate_of(at(free_port(), keys))
    assert trouble(at(1, keys, "no-such-host.invalid"))


def test_another_authority_and_another_protocol(keys: Keys, tmp_path: Path):
    other = certify(tmp_path / "other", ["north"])
    with server(keys) as port, pytest.raises(SordinoError, match=r"is not trusted: .*must be the authority"):
        certificate_of(at(port, other))
    with server(None) as port, pytest.raises(SordinoError, match="does not speak TLS properly"):
        certificate_of(at(port, keys))


def test_a_certificate_for_another_name(keys: Keys):
    with server(keys, host="127.0.0.2") as port, pytest.raises(SordinoError, match=r"is not trusted: .*mismatch"):
        certificate_of(at(port, keys, "127.0.0.2"))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "sordino.site")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_lost_server_is_told_once_with_its_reason_and_once_when_it_is_back(tmp_path: Path, keys: Keys, said):
    log = tmp_path / "supernode.log"
    log.write_text(FAILED)  # of an earlier life
    line = Line(log, at(9, keys), why=lambda address: "connection refused")
    line.look()
    assert line.lost is None
    with open(log, "a") as file:
        for part in (FAILED, FAILED[:20]):
            file.write(part)
            file.flush()
            line.look()
        began = line.lost
        assert began is not None
        assert abs(began - time.time()) < 10
        file.write(FAILED[20:] + FAILED * 50)
        file.flush()
        line.look()
        assert line.lost == began
        file.write(BACK)
        file.flush()
        line.look()
        assert line.lost is None
        file.write(FAILED)
        file.flush()
        line.look()
    first, second, third = said()
    since = time.strftime("%H:%M:%S", time.localtime(began))
    assert first == f"no connection to 127.0.0.1:9 since {since}: connection refused; trying again"
    assert second.startswith("connected to 127.0.0.1:9, after ")
    assert third.startswith("no connection to 127.0.0.1:9 since ")


def test_a_server_that_takes_connections_and_does_not_answer(tmp_path: Path, keys: Keys, said):
    log = tmp_path / "supernode.log"
    line = Line(log, at(9, keys), why=lambda address: None)
    log.write_text(FAILED)
    line.look()
    assert "it takes connections, and its SuperLink does not answer" in said()[0]


def test_waiting_for_a_server_says_so_once(tmp_path: Path, keys: Keys, said):
    port = free_port()
    line = Line(tmp_path / "none.log", at(port, keys))
    waiting = threading.Thread(target=meet, args=(line, 60.0))
    waiting.start()
    time.sleep(1.2)
    with server(keys, port):
        waiting.join(20)
    assert not waiting.is_alive()
    assert [text.split(" since ")[0].split(",")[0] for text in said()] == [
        f"no connection to 127.0.0.1:{port}",
        f"connected to 127.0.0.1:{port}",
    ]
    assert "connection refused" in said()[0]


def test_waiting_has_an_end(tmp_path: Path, keys: Keys):
    line = Line(tmp_path / "none.log", at(free_port(), keys))
    with pytest.raises(SordinoError, match=r"nobody answers at 127\.0\.0\.1:\d+ after 0\.1 s: connection refused"):
        meet(line, 0.1)


def test_a_server_says_whether_it_knows_a_key(tmp_path: Path, keys: Keys):
    from sordino.engine.federation.keyring import Keyring

    other = certify(tmp_path / "other", ["north"])
    port, nobody = free_port(), f"http://127.0.0.1:{free_port()}"
    front = Front("127.0.0.1", port, nobody, None, Keyring(keys).names, keys.server)
    front.start()
    try:
        assert knows(at(port, keys), load_private(keys.private("north")).public_key())
        assert not knows(at(port, keys), load_private(other.private("north")).public_key())
    finally:
        front.stop()
    with server(keys) as port, pytest.raises(SordinoError, match="was reached and did not answer"):
        knows(at(port, keys), load_private(keys.private("north")).public_key())
