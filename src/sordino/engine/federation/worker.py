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
from types import SimpleNamespace
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
        check_flower()
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        self._address = f"http://127.0.0.1:{port}"
        signed = ["/flwr.proto.Runtime/AcquireTask"]
        self._tasks = self._line(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=signed))

    def _line(self, credentials: Any) -> Any:
        """A client of the SuperNode's interface for workers, which uses no proxy and follows no redirects."""
        import httpx
        from flwr.supercore.runtime import RuntimeHttpClient

        made = RuntimeHttpClient(self._address, interceptors=[credentials])
        made._client = httpx.Client(timeout=30.0, trust_env=False)
        return made

    def close(self) -> None:
        """Close the connection to the SuperNode."""
        self._tasks.close()

    def serve_one(self, answer: Callable[[bytes], bytes], wait: float) -> bool:
        """Answer one message if there is one, else wait so many seconds; whether there was one."""
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supernode.runtime.run_clientapp import push_message

        kind, token = self._take()
        if not token:
            time.sleep(wait)
            return False
        try:
            with self._line(RuntimeTokenHttpInterceptor(token)) as line, _alive(line):
                message, content = _pull(line)
                whose = SimpleNamespace(node_id=0, run_id=message.metadata.run_id)
                push_message(line, _reply(kind, message, content, answer), whose)
                # The task ends as stopped, for no app was run.
                line.PushTaskOutput(PushTaskOutputRequest(sub_status="stopped", details="answered without an app"))
        except Lost:
            raise
        except Exception as error:  # no answer left: the SuperNode would wait for one for ever
            raise Lost(f"a message was lost on its way ({type(error).__name__}: {error})") from error
        return True

    def _take(self) -> tuple[str, str]:
        """The kind of a task that waits, of all kinds, and the token that it is worked on with; none without one."""
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        try:
            found = self._tasks.AcquireTask(AcquireTaskRequest(supported_task_types=[str(one) for one in TaskType]))
        except httpx.TransportError:  # it starts, or has ended: whoever looks after it knows
            return "", ""
        except httpx.HTTPError as error:
            raise Lost(f"the SuperNode gives no tasks: {error}") from error
        return found.task.type, found.token


def _pull(line: Any) -> tuple[Any, Any]:
    """The message of a task, and its content; None where that is nothing Flower knows."""
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

    until = time.monotonic() + FIRST
    while not (found := line.PullMessages(PullAppMessagesRequest())).messages_list:
        if time.monotonic() > until:
            raise Lost("a task came without a message")
        time.sleep(0.02)
    message, tree = message_from_proto(found.messages_list[0]), found.message_object_trees[0]
    ids = list(dict.fromkeys(one.object_id for one in iterate_object_tree(tree)))
    part = make_pull_object_fn_protobuf(line.PullObject, Node(), message.metadata.run_id)
    contents = pull_objects(ids, part, initial_backoff=0.05, backoff_cap=1.0)
    line.ConfirmMessageReceived(ConfirmMessageReceivedRequest(message_object_id=tree.object_id))
    try:
        whole: Any = inflate_object_from_contents(tree.object_id, contents)
        return message, whole.content
    except Exception:  # somebody else wrote it, and it is answered with an error
        return message, None


@contextlib.contextmanager
def _alive(line: Any) -> Iterator[None]:
    """Signs of life while a task is worked on; a turn may take hours."""
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            with contextlib.suppress(Exception):  # a SuperNode that is away is noticed when the reply is pushed
                line.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
    loop.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(min(seconds, LOOK))})


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
