"""The server's only open port: passes the calls of Flower's fleet to a SuperLink on loopback, and nothing else.

A SuperLink answers control, runtime and fleet at one address, control without credentials: whoever reaches it starts
apps and registers keys. Here a call goes through when it is one of ``FLEET`` and shows a key of the federation; Flower
then checks that the caller has that key. Paths and headers are not passed on but written anew from what is listed here.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Container
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
    """The server's open port, served in a thread of its own.

    ``inner``: the SuperLink's address, such as ``https://127.0.0.1:4711``, and the authority to check it by.
    ``known``: finds the keys that count now, as Flower carries them: one that was revoked is turned away from its next
    call on. None lets everyone call, in a trial without keys.
    ``certificate``: certificate and private key for TLS; None without.
    """

    def __init__(
        self,
        host: str,
        port: int,
        inner: str,
        authority: Path | None,
        known: Callable[[], Container[bytes]] | None,
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
        """Answer one call (the interface that ASGI servers want)."""
        from starlette.requests import Request

        if scope["type"] == "http":
            response = await self._respond(Request(scope, receive))
            await response(scope, receive, send)

    async def _respond(self, call: Any) -> Any:
        """What is answered to a call: what the SuperLink says to it, or why it does not go through."""
        path, said = call.scope["path"], call.headers.get("content-length", "")
        plain = call.scope.get("raw_path") in (None, path.encode()) and not call.scope.get("query_string")
        size = int(said) if said.isdecimal() and len(said) < 12 else MOST + 1  # one that does not say is too large
        if call.method != "POST" or path not in self.calls or not plain:
            return _refusal(403, "the fleet's calls are answered here, and nothing else")
        if self.known is not None and _key(call) not in self.known():
            return _refusal(412, UNKNOWN)  # which Flower reads out; at 401 it ends without a word
        if size > MOST:
            return _refusal(413, f"a call has at most {MOST} bytes")
        return await self._pass(call, path, size)

    async def _pass(self, call: Any, path: str, size: int) -> Any:
        import httpx
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        if self._line is None:  # here, because it belongs to the thread's loop
            verify = str(self.authority) if self.authority is not None else False
            limits = httpx.Limits(max_connections=200, max_keepalive_connections=50)
            self._line = httpx.AsyncClient(verify=verify, timeout=120.0, trust_env=False, limits=limits)
        passed = {name: call.headers[name] for name in HEADERS if name in call.headers}
        passed |= {"accept-encoding": "identity", "content-length": str(size)}
        try:
            came = await self._line.post(self.inner + path, content=call.stream(), headers=passed)
        except (httpx.HTTPError, ClientDisconnect) as error:
            log.debug("the SuperLink does not answer: %s", error)
            return _refusal(503, "the SuperLink is not there")
        names = [name for name in came.headers if name == "content-type" or name.startswith("flwr-")]
        return Response(came.content, came.status_code, {name: came.headers[name] for name in names})


def _key(call: Any) -> bytes:
    """The public key that a call shows."""
    try:
        return base64.b64decode(call.headers.get("flwr-public-key", ""), validate=True)
    except ValueError:
        return b""


def _refusal(status: int, text: str) -> Any:
    """An error in the form that Flower's client reads out."""
    from starlette.responses import JSONResponse

    return JSONResponse({"code": status, "detail": text}, status, {"connection": "close"})
