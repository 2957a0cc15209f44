"""How a command ends when it is told to."""

from __future__ import annotations

import signal
import threading
from typing import Any


def end_in_order() -> None:
    """SIGTERM, which service managers send, ends a command like Ctrl-C: ledgers are sealed, and what it started ends.

    A second one changes nothing: the first is being obeyed.
    """

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
