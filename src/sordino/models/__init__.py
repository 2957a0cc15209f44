"""The models room: networks by name, and what makes any network fit for record-level privacy. Opens no other room."""

from sordino.models.features import check_features, extractor
from sordino.models.fixed import Features, apply_fixed, digest, frozen, one_by_one, split_fixed
from sordino.models.isolation import (
    check,
    dtype_of,
    isolated,
    private_ready,
    refuse_batch_statistics,
    refuse_not_finite,
    why_not_isolated,
)
from sordino.models.lora import has_adapters, lora, merged
from sordino.models.usual import reach, usual, weight_size
from sordino.models.zoo import build, check_spec, names

__all__ = [
    "Features",
    "apply_fixed",
    "build",
    "check",
    "check_features",
    "check_spec",
    "digest",
    "dtype_of",
    "extractor",
    "frozen",
    "has_adapters",
    "isolated",
    "lora",
    "merged",
    "names",
    "one_by_one",
    "private_ready",
    "reach",
    "refuse_batch_statistics",
    "refuse_not_finite",
    "split_fixed",
    "usual",
    "weight_size",
    "why_not_isolated",
]
