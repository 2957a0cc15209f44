"""A commitment to a site's records: what its ledger is tied to. It says nothing about them without the secret salt."""

from __future__ import annotations

import hashlib
import hmac

import torch
from torch import Tensor

from sordino.client.rows import Records

PIECE = 1 << 16
"""Records that are hashed at a time: they may lie on disk."""


def commitment(records: Records, salt: bytes) -> str:
    """HMAC-SHA-256 over the encoded records, their order included; a null row counts as null, whatever it holds."""
    digest = hmac.new(salt, digestmod=hashlib.sha256)
    for name, part in (("x", records.x), ("y", records.y)):
        digest.update(f"{name} {part.dtype} {tuple(part.shape)};".encode())
        for start in range(0, len(part), PIECE):
            piece = part[start : start + PIECE]
            if records.valid is not None:
                piece = piece.clone()
                piece[~records.valid[start : start + PIECE]] = 0
            digest.update(_bytes(piece))
    valid = torch.ones(len(records.y), dtype=torch.bool) if records.valid is None else records.valid
    digest.update(_bytes(valid))
    return digest.hexdigest()


def _bytes(part: Tensor) -> memoryview:
    return memoryview(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
