"""Everything a method is made of, in one import: the types of its parts, their factories, and what they are told.

>>> import sordino as sd
>>> from sordino import parts
>>> halved = parts.Clip("halved", lambda losses, norms, public: 0.5 + 0 * norms, lambda public: public["clip"])
>>> method = sd.Method("mine", clip=halved, aggregate=parts.aggregate.robust_hdp(every=5))

``parts.select``, ``ask``, ``local``, ``clip``, ``aggregate`` and ``server`` hold the factories of the parts that come
with sordino, by the names that a study uses, with ``_`` for ``-``.
"""

from __future__ import annotations

from types import SimpleNamespace

from sordino.client.ask import Question
from sordino.client.clip import Clip, Public
from sordino.client.local import Local
from sordino.made import Factory, Made, part
from sordino.methods.asking import Ask
from sordino.methods.calibrate import Calibrate
from sordino.methods.method import Method
from sordino.methods.registry import PARTS
from sordino.methods.selection import Candidates, Selection, Setting
from sordino.server.after import ServerStep
from sordino.server.broadcast import Frame, number, vector
from sordino.server.facts import Facts, Outcome, Told
from sordino.server.rule import Aggregate, weighted
from sordino.server.select import Schedule


def _by_name(kind: str) -> SimpleNamespace:
    return SimpleNamespace(**{name.replace("-", "_"): factory for name, factory in PARTS[kind].items()})


select, ask, local, clip, aggregate, server = (
    _by_name(kind) for kind in ("select", "ask", "local", "clip", "aggregate", "server")
)

__all__ = [
    "Aggregate",
    "Ask",
    "Calibrate",
    "Candidates",
    "Clip",
    "Factory",
    "Facts",
    "Frame",
    "Local",
    "Made",
    "Method",
    "Outcome",
    "Public",
    "Question",
    "Schedule",
    "Selection",
    "ServerStep",
    "Setting",
    "Told",
    "aggregate",
    "ask",
    "clip",
    "local",
    "number",
    "part",
    "select",
    "server",
    "vector",
    "weighted",
]
