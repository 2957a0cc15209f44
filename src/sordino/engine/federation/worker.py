"""A SuperNode that only carries messages, and the worker of ours that takes all its tasks.

A SuperNode in process isolation leaves its tasks to whoever asks for them. Flower's own askers install and import the
app that came with a task, each kind its own way; this worker opens no app. It answers packets of sordino and returns an
error to everything else, for a message without an answer would block the SuperNode for ever.

The one module that uses Flower's internals: pinned to ``FLOWER``, and it refuses to start with another. The SuperNode
runs as ``python -m sordino.engine.federation.worker`` with the arguments of ``flower-supernode``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sordino.errors import BadInput, SordinoError

log = logging.getLogger("sordino.site")

FLOWER = "1.41."
"""The only versions of Flower whose insides this module knows."""

ANSWERED = ("flwr-clientapp", "train")
"""The kind of task, and of message, that a packet of sordino comes in."""

LOOK = 0.25  # seconds between two looks of the SuperNode for a message; Flower's own pace is three
BEAT = 10.0  # seconds between two signs of life to the SuperNode while a task is worked on; it gives up after sixty
FIRST = 30.0  # seconds between a task and its message, at most: the SuperNode makes them one after the other

STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
"""What Python calls the start of a process in its audit events."""


class Lost(SordinoError):
    """A message cannot be answered any more: the SuperNode has to be started again, and the server will ask again."""


def check_flower() -> None:
    """Refuse a Flower whose insides nobody looked at."""
    from flwr.supercore.version import package_version

    if not package_version.startswith(FLOWER):
        raise BadInput(
            f"a site needs Flower {FLOWER}x, and {package_version} is installed: pip install 'sordino[flower]'"
        )


class Worker:
    """Takes the tasks of the SuperNode at a port of this machine, one after the other, and answers packets.

    Guarantees
    ----------
    Nothing of an app is fetched, unpacked, imported or run: tasks are taken without their input, which is where Flower
    puts the bundle. Every message of every kind gets an answer, or ``Lost`` is raised.
    """

    def __init__(self, port: int, secret: bytes) -> None:
        import httpx
        from flwr.supercore.auth import derive_auth_secret

        check_flower()
        self._secret = derive_auth_secret(secret)
        self._line = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/runtime/", timeout=30.0, trust_env=False)

    def close(self) -> None:
        """Close the connection to the SuperNode."""
        self._line.close()

    def serve_one(self, answer: Callable[[bytes], bytes], wait: float) -> bool:
        """Answer one message if there is one, else wait so many seconds; whether there was one."""
        kind, token = self._take()
        if not token:
            time.sleep(wait)
            return False
        try:
            with self._alive(token):
                message, content = self._message(token)
                self._push(token, message, _reply(kind, message, content, answer))
        except Lost:
            raise
        except Exception as error:  # no answer left: the SuperNode would wait for one for ever
            raise Lost(f"a message was lost on its way ({type(error).__name__}: {error})") from error
        return True

    def _take(self) -> tuple[str, str]:
        """The kind of a task that waits, of all kinds, and the token that it is worked on with; none without one."""
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.auth import create_superexec_auth_metadata
        from flwr.supercore.constant import TaskType

        request = AcquireTaskRequest(supported_task_types=[str(one) for one in TaskType])
        method = "/flwr.proto.Runtime/AcquireTask"
        signed = create_superexec_auth_metadata(auth_secret=self._secret, method=method, request=request)
        try:
            found = self._call("acquire-task", request, dict(signed))
        except httpx.TransportError:  # it starts, or has ended: whoever looks after it knows
            return "", ""
        except httpx.HTTPError as error:
            raise Lost(f"the SuperNode gives no tasks: {error}") from error
        return found.task.type, found.token

    def _message(self, token: str) -> tuple[Any, Any]:
        """The message of a task, and its content; None where that is nothing Flower knows."""
        from flwr.common.serde import message_from_proto
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

        until = time.monotonic() + FIRST
        while not (found := self._work(token, "pull-messages", PullAppMessagesRequest())).messages_list:
            if time.monotonic() > until:
                raise Lost("a task came without a message")
            time.sleep(0.02)
        message, tree = message_from_proto(found.messages_list[0]), found.message_object_trees[0]
        ids = list(dict.fromkeys(one.object_id for one in iterate_object_tree(tree)))
        contents = pull_objects(ids, lambda one: self._object(token, one), initial_backoff=0.05, backoff_cap=1.0)
        self._work(token, "confirm-message-received", ConfirmMessageReceivedRequest(message_object_id=tree.object_id))
        try:
            whole: Any = inflate_object_from_contents(tree.object_id, contents)
            return message, whole.content
        except Exception:  # somebody else wrote it, and it is answered with an error
            return message, None

    def _object(self, token: str, name: str) -> bytes:
        from flwr.proto.message_pb2 import PullObjectRequest
        from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

        found = self._work(token, "pull-object", PullObjectRequest(object_id=name))
        if not found.object_found:
            raise Lost("a part of a message is missing")
        if not found.object_available:
            raise ObjectUnavailableError(name)
        return bytes(found.object_content)

    def _push(self, token: str, message: Any, reply: Any) -> None:
        """Hand the reply to the SuperNode and end the task: as stopped, for no app was run."""
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushTaskOutputRequest
        from flwr.supercore.inflatable import inflatable_object as inflatable

        reply.metadata.__dict__["_message_id"] = reply.object_id
        with inflatable.no_object_id_recompute():
            bare, tree = message_to_proto(remove_content_from_message(reply)), inflatable.get_object_tree(reply)
            request = PushAppMessagesRequest(messages_list=[bare], message_object_trees=[tree])
            taken = self._work(token, "push-messages", request)
            about = {"run_id": message.metadata.run_id, "session_id": taken.session_id}
            for name, part in inflatable.get_all_nested_objects(reply).items():
                if name not in taken.objects_to_push:
                    continue
                sent = PushObjectRequest(object_id=name, object_content=part.deflate(), **about)
                if not self._work(token, "push-object", sent).stored:
                    raise Lost("the SuperNode did not take a reply")
        ended = PushTaskOutputRequest(sub_status="stopped", details="answered without an app")
        self._work(token, "push-task-output", ended)

    @contextlib.contextmanager
    def _alive(self, token: str) -> Iterator[None]:
        """Signs of life while a task is worked on; a turn may take hours."""
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT):
                with contextlib.suppress(Exception):  # a SuperNode that is away is noticed when the reply is pushed
                    self._work(token, "send-task-heartbeat", SendTaskHeartbeatRequest())

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _work(self, token: str, what: str, request: Any) -> Any:
        """A call about the task of this token."""
        import httpx
        from flwr.supercore.constant import TASK_TOKEN_HEADER

        try:
            return self._call(what, request, {TASK_TOKEN_HEADER: token})
        except httpx.HTTPError as error:
            raise Lost(f"the SuperNode did not answer {what!r}: {error}") from error

    def _call(self, what: str, request: Any, headers: dict[str, str]) -> Any:
        """What the SuperNode answers to a request: the message that is called Response where the request is Request."""
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

        headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE, **headers}
        came = self._line.post(what, content=request.SerializeToString(deterministic=True), headers=headers)
        came.raise_for_status()
        kind = type(request).__name__.removesuffix("Request") + "Response"
        return getattr(sys.modules[type(request).__module__], kind).FromString(came.content)


def _reply(kind: str, message: Any, content: Any, answer: Callable[[bytes], bytes]) -> Any:
    """The answer to a message of a task of this kind: a packet's from ``answer``, an error to everything else."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    from sordino.engine.federation.wire import from_records, to_records  # here: the SuperNode needs no torch

    asked = (kind, message.metadata.message_type)
    try:
        if asked != ANSWERED:
            raise BadInput(f"no app runs here, and {asked[1]!r} for {asked[0]!r} is nothing that this site answers")
        packet = from_records(content)
    except BadInput as error:
        log.warning("refused what came in Flower's run %s: %s", message.metadata.run_id, error)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"refused: {error}"), reply_to=message)
    return Message(to_records(answer(packet)), reply_to=message)


class Clock:
    """The module ``time``, with shorter sleeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep, for ``LOOK`` seconds at most."""
        time.sleep(min(seconds, LOOK))


def carry_only(loop: Any) -> None:
    """Make a SuperNode's loop fetch and open no app, whatever the run, and call nobody but its server."""
    from flwr.supercore.fab import Fab
    from flwr.supercore.protobuf.client import ProtobufClient

    connect, pull, made = loop._init_connection, loop._pull_and_store_message, ProtobufClient.__init__

    @contextlib.contextmanager
    def without_apps(*args: Any, **options: Any) -> Iterator[Any]:
        with connect(*args, **options) as (node, receive, send, get_run, _, *rest):
            yield (node, receive, send, get_run, lambda name, run: Fab("", b"", {}), *rest)

    def one_message(*args: Any, **options: Any) -> Any:
        options["state"].delete_messages()  # a reply to a message that was given up must not answer the next one
        return pull(*args, **options)

    def without_detours(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self._client.follow_redirects = False  # a server could send a site's calls anywhere in the site's own network

    ProtobufClient.__init__ = without_detours
    loop._init_connection, loop._pull_and_store_message = without_apps, one_message
    loop.get_fused_config_from_fab = lambda bundle, run: {}
    loop.time = Clock()


def start_nothing(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook for the SuperNode's process: whatever Flower would start, it starts nothing."""
    if event in STARTS:
        raise PermissionError(f"a site's SuperNode starts no process ({event})")


def main() -> None:
    """Run the SuperNode, which carries messages and has no means to run an app."""
    check_flower()
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    carry_only(loop)
    sys.addaudithook(start_nothing)
    flower_supernode()


if __name__ == "__main__":
    main()
