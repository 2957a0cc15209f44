"""The models room: networks by name, and what makes any network fit for record-level privacy. Opens no other room."""

from sordino.models.build import build, check_spec, names
from sordino.models.fixed import apply_fixed, split_fixed
from sordino.models.isolation import isolated, why_not_isolated
from sordino.models.ready import check, private_ready, refuse_batch_statistics, refuse_tied_weights

__all__ = [
    "apply_fixed",
    "build",
    "check",
    "check_spec",
    "isolated",
    "names",
    "private_ready",
    "refuse_batch_statistics",
    "refuse_tied_weights",
    "split_fixed",
    "why_not_isolated",
]
