"""Whether a site reaches its server: what is wrong with the way there, and since when.

A SuperNode that loses its server tries again for ever and says so in its own log, without a reason. ``Line`` reads that
log, asks ``trouble`` for the reason, and says one line when the server is lost and one when it is back.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sordino.engine.federation.front import UNKNOWN
from sordino.engine.federation.node import Address
from sordino.errors import BadInput, SordinoError

log = logging.getLogger("sordino.site")

SECONDS = 5.0  # a server has to take a connection up
FAILED = "Connection attempt failed"
BACK = ("Connection successful", "SuperNode ID:")
"""What a SuperNode's log says when a call to its server failed, and when one went through again."""

KNOCK = "/v1/fleet/send-node-heartbeat"
"""The call by which a server is asked whether it knows a key: unsigned, so that it does nothing beyond the front."""


class Away(SordinoError):
    """Nobody answers at the server's address now; that may pass."""


def certificate_of(address: Address) -> dict[str, Any]:
    """Connect to the server and check its certificate; what that says, nothing without TLS.

    Raises ``Away`` where nobody answers, another error that says what is wrong where somebody does.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout=SECONDS) as line:
            if address.authority is None:
                return {}
            with _tls(address.authority).wrap_socket(line, server_hostname=address.host) as safe:
                return dict(safe.getpeercert() or {})
    except ssl.SSLCertVerificationError as error:
        raise SordinoError(
            f"the server at {address} is not trusted: {error.verify_message}; "
            f"{address.authority} must be the authority that signed its certificate, for this address, and in force"
        ) from None
    except ssl.SSLError as error:
        raise SordinoError(f"the server at {address} does not speak TLS properly: {error.reason}") from None
    except TimeoutError:
        raise Away(f"no answer within {SECONDS:g} s (a firewall, or a machine that is off)") from None
    except OSError as error:  # a name that nobody knows, too
        raise Away(str(error.strerror or error).lower()) from None


def _tls(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"keys.authority: {authority} is no certificate ({error})") from None


def trouble(address: Address) -> str | None:
    """What is wrong at the server's address right now, in words; None where it takes connections and is trusted."""
    try:
        certificate_of(address)
    except SordinoError as error:
        return str(error)
    return None


def meet(line: Line, seconds: float) -> None:
    """Wait until the server answers, and check its certificate before anything else is said.

    Raises an error that says what is wrong with the certificate, or that nobody answered in time.
    """
    until, waited = time.monotonic() + seconds, False
    while True:
        try:
            certificate_of(line.address)
            break
        except Away as error:
            waited |= line.down(str(error))
            if time.monotonic() >= until:
                raise SordinoError(f"nobody answers at {line.address} after {seconds:g} s: {error}") from None
            time.sleep(0.5)
    if waited:  # where something else than the address was in the way, the SuperNode tells when that is over
        line.up()


def knows(address: Address, key: ec.EllipticCurvePublicKey) -> bool:
    """Whether the server lets this key in. It shows the key and signs nothing, so that nothing else comes of it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    shown = base64.b64encode(key.public_bytes(serialization.Encoding.PEM, form)).decode()
    if address.authority is None:
        raise SordinoError("without TLS nobody shows a key")
    context = _tls(address.authority)
    with contextlib.closing(
        http.client.HTTPSConnection(address.host, address.port, timeout=SECONDS, context=context)
    ) as line:
        try:
            line.request("POST", KNOCK, b"", {"flwr-public-key": shown, "content-type": "application/x-protobuf"})
            said = line.getresponse().read(4096).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise SordinoError(f"{address} was reached and did not answer ({error})") from None
    return UNKNOWN not in said


class Line:
    """The line to a server as a SuperNode's log tells of it; ``look`` now and then.

    ``lost``: since when there is no connection, in seconds since 1970; None while there is one.
    """

    def __init__(self, file: Path, address: Address, why: Callable[[Address], str | None] = trouble) -> None:
        self.file, self.address, self.why = file, address, why
        self.lost: float | None = None
        self._one = threading.RLock()  # the site's loop and whoever watches the log both tell
        self._read = file.stat().st_size if file.exists() else 0

    def look(self) -> None:
        """Read what is new in the log, and say it if the server was lost, or is back."""
        with contextlib.suppress(OSError), open(self.file, "rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # half a line is read when it is whole
            self._read += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if FAILED in line:
                    self.down()
                elif any(word in line for word in BACK):
                    self.up()

    def down(self, why: str | None = None) -> bool:
        """The server is lost; says so once. Whether that is news."""
        with self._one:
            if self.lost is not None:
                return False
            self.lost = time.time()
            since = time.strftime("%H:%M:%S", time.localtime(self.lost))
            found = why or self.why(self.address) or "it takes connections, and its SuperLink does not answer"
            log.warning("no connection to %s since %s: %s; trying again", self.address, since, found)
            return True

    def up(self) -> None:
        """The server is there; says so if it was lost."""
        with self._one:
            if self.lost is not None:
                log.info("connected to %s, after %.0f s without", self.address, time.time() - self.lost)
                self.lost = None
