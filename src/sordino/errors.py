"""What can go wrong, sorted by what the caller should do about it. The command line turns each into an exit code."""


class SordinoError(Exception):
    """Anything sordino refuses or cannot do; the message names the cause and the remedy."""

    exit_code = 1


class BadInput(SordinoError, ValueError):
    """The caller asked for something impossible: a wrong key, a wrong value, a file that is not there."""

    exit_code = 2


class CannotStack(BadInput):
    """These runs cannot share a stack; each can be trained alone."""


class BudgetRefused(SordinoError):
    """A charge would overdraw a client's budget, so nothing was read and nothing was released."""

    exit_code = 3


class Diverged(SordinoError):
    """Training left the range of numbers: the model, or its loss, is no longer finite."""


class LedgerDamaged(SordinoError):
    """The ledger's file was truncated, changed by hand, or is not a ledger."""

    exit_code = 1
