"""The privacy room: types, accountants, the ledger, the gate, generators, the audit. Opens no other room."""

from sordino.privacy.accounting import calibrate, epsilon
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Adjacency, Budget, Event, Release, Sampling, Scheme

__all__ = ["Adjacency", "Budget", "Event", "Ledger", "Release", "Sampling", "Scheme", "calibrate", "epsilon"]
