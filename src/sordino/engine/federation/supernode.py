"""Flower's SuperNode, looking for messages twice a second instead of every three seconds.

Run as ``python -m sordino.engine.federation.supernode`` with the arguments of ``flower-supernode``. Where another
version of Flower waits in another way, it runs at that version's own pace.
"""

from __future__ import annotations

import time
from typing import Any

LOOK = 0.5
"""The longest pause between two looks, in seconds."""


class Clock:
    """The module ``time``, with shorter sleeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep, but not long."""
        time.sleep(min(seconds, LOOK))


def main() -> None:
    """Run the SuperNode."""
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    if getattr(loop, "time", None) is time:
        loop.time = Clock()
    flower_supernode()


if __name__ == "__main__":
    main()
