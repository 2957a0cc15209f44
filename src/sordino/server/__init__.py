"""The server room: what the server decides from releases and public facts.

Opens ``privacy.types`` and ``privacy.cells`` only.
"""

from sordino.server import after, aggregate, bounds, facts, pursuit, rules, select

__all__ = ["after", "aggregate", "bounds", "facts", "pursuit", "rules", "select"]
