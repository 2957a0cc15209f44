"""The server's only open port: passes the calls of Flower's fleet to a SuperLink on loopback, and nothing else.

A SuperLink answers control, runtime and fleet at one address, control without credentials: whoever reaches it starts
apps and registers keys. Here a call goes through when it is one of ``FLEET`` and shows a key of the federation; Flower
then checks that the caller has that key. Paths and headers are not passed on but written anew from what is listed here.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError

log = logging.getLogger("sordino.serve")

_CALLS = "activate-node deactivate-node send-node-heartbeat pull-messages push-messages get-run push-object pull-object"
FLEET = frozenset(f"/v1/fleet/{call}" for call in (*_CALLS.split(), "confirm-message-received"))
"""What a site's SuperNode calls. It fetches no app, so nobody may."""

UNNAMED = frozenset({"/v1/fleet/register-node", "/v1/fleet/unregister-node"})
"""What one without a key calls too, in a trial without keys: keys are registered from the keys' folder alone."""

HEADERS = ["content-type", "accept", "flwr-public-key", "flwr-timestamp", "flwr-signature"]
HEADERS += ["flwr-package-name", "flwr-package-version", "flwr-component-name"]
"""What goes along with a call, Flower's versions included."""

MOST = 64 << 20
"""Bytes of the largest call; Flower cuts what is larger into pieces of five million."""

UNKNOWN = "this key is not enrolled here"
"""What a site with another key is told."""

START = 10.0  # seconds the front has to come up


class Front:
    """The open port, in a thread of its own.

    ``inner``: the SuperLink's address, such as ``https://127.0.0.1:4711``, and the authority to check it by.
    ``known``: the keys that count now, as Flower carries them; None lets everyone call, in a trial without keys.
    ``certificate``: certificate and private key for TLS; None without.
    """

    def __init__(
        self,
        host: str,
        port: int,
        inner: str,
        authority: Path | None,
        known: Callable[[], set[bytes]] | None,
        certificate: tuple[Path, Path] | None,
    ) -> None:
        import uvicorn

        self.inner, self.authority, self.known = inner, authority, known
        self.calls = FLEET if known is not None else FLEET | UNNAMED
        self._line: Any = None
        options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "off"}
        if certificate is not None:
            options |= {"ssl_certfile": str(certificate[0]), "ssl_keyfile": str(certificate[1])}
        self._server = uvicorn.Server(uvicorn.Config(self, host=host, port=port, timeout_keep_alive=30, **options))
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    def start(self) -> None:
        """Open the port and wait until it answers; raises if it does not come up in time."""
        self._thread.start()
        until, where = time.monotonic() + START, self._server.config
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise SordinoError(f"the front does not come up at {where.host}:{where.port}")
            time.sleep(0.02)

    @property
    def running(self) -> bool:
        """Whether the port is served."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Close the port and end the thread that serves it."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(START)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # uvicorn's way to say that the port is taken
            self._server.run()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One call (ASGI)."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        path = scope["path"] if scope.get("raw_path") in (None, scope["path"].encode()) else ""
        if scope["method"] != "POST" or path not in self.calls or scope.get("query_string"):
            await _refuse(send, 403, "the fleet's calls are answered here, and nothing else")
        elif self.known is not None and _key(headers) not in self.known():
            await _refuse(send, 412, UNKNOWN)  # which Flower reads out; at 401 it ends without a word
        elif _size(headers) > MOST:
            await _refuse(send, 413, f"a call has at most {MOST} bytes")
        else:
            await self._pass(path, headers, receive, send)

    async def _pass(self, path: str, headers: dict[str, bytes], receive: Any, send: Any) -> None:
        import httpx

        if self._line is None:  # here, because it belongs to the thread's loop
            verify = str(self.authority) if self.authority is not None else False
            limits = httpx.Limits(max_connections=200, max_keepalive_connections=50)
            self._line = httpx.AsyncClient(verify=verify, timeout=120.0, trust_env=False, limits=limits)
        passed = {name: headers[name] for name in HEADERS if name in headers}
        passed |= {"accept-encoding": b"identity", "content-length": str(_size(headers)).encode()}
        try:
            call = self._line.build_request("POST", self.inner + path, content=_body(receive), headers=passed)
            came = await self._line.send(call)
        except httpx.HTTPError as error:
            log.debug("the SuperLink does not answer: %s", error)
            await _refuse(send, 503, "the SuperLink is not there")
            return
        names = [name for name in came.headers if name == "content-type" or name.startswith("flwr-")]
        back = [(name.encode(), came.headers[name].encode()) for name in names]
        await _answer(send, came.status_code, back, came.content)


def _key(headers: dict[str, bytes]) -> bytes:
    """The public key that a call shows."""
    try:
        return base64.b64decode(headers.get("flwr-public-key", b""), validate=True)
    except binascii.Error:
        return b""


def _size(headers: dict[str, bytes]) -> int:
    """Bytes of the call's body; a call that does not say counts as too large."""
    said = headers.get("content-length", b"")
    return int(said) if said.isdigit() and len(said) < 12 else MOST + 1


async def _body(receive: Any) -> AsyncIterator[bytes]:
    more = True
    while more:
        part = await receive()
        if part["type"] == "http.disconnect":
            return
        more = bool(part.get("more_body"))
        yield part.get("body", b"")


async def _refuse(send: Any, status: int, text: str) -> None:
    """Answer with an error in the form that Flower's client reads out."""
    body = json.dumps({"code": status, "detail": text}).encode()
    await _answer(send, status, [(b"content-type", b"application/json"), (b"connection", b"close")], body)


async def _answer(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
