"""What a site keeps for its runs: clients' state between turns, and a commitment to its records.

A client's state (control variates, duals) is made of releases alone, so it is no more secret than they are; it stays at
the site because nobody needs it elsewhere. There is one file a turn, so that a turn can be taken again.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sordino.client.rows import Records
from sordino.engine.checkpoint import write_atomic
from sordino.errors import SordinoError

_NAME = re.compile(r"(\d{8})-(\d{4})\.safetensors")

OWN_MODEL = "own-model.safetensors"
"""Where a site whose method gives it a model of its own finds it, in the folder of the run."""

PIECE = 1 << 16  # records that are hashed at a time: they may lie on disk


class LocalState:
    """The states that the turns of one run left on the site's disk, by (round, copy)."""

    def __init__(self, folder: Path, names: tuple[str, ...], dimension: int) -> None:
        self.folder = folder
        self.names = names
        self.dimension = dimension

    def _files(self) -> dict[tuple[int, int], Path]:
        found = [(match, one) for one in self.folder.glob("*.safetensors") if (match := _NAME.fullmatch(one.name))]
        return dict(sorted(((int(m[1]), int(m[2])), one) for m, one in found))

    def before(self, number: int, copy: int, since: int) -> dict[str, Tensor]:
        """What a turn starts from: the newest state of an earlier turn that the server heard of, or zeros.

        ``since`` is the last round of this site that counted at the server. What a later turn left was lost on the way;
        earlier copies of the same round do count.
        """
        usable = [p for at, p in self._files().items() if at < (number, copy) and (at[0] <= since or at[0] == number)]
        if not self.names or not usable:
            return {name: torch.zeros(1, self.dimension) for name in self.names}
        try:
            return {name: value for name, value in load_file(usable[-1]).items() if name in self.names}
        except (SafetensorError, OSError) as error:
            raise SordinoError(f"{usable[-1]} cannot be read: {error}") from None

    def keep(self, number: int, copy: int, since: int, state: dict[str, Tensor]) -> None:
        """Write what a turn left, and drop what no turn can start from any more."""
        if not self.names:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{number:08d}-{copy:04d}.safetensors"
        write_atomic(path, save({name: state[name].detach().cpu().contiguous() for name in self.names}))
        files = self._files()
        counted = max((at for at in files if at[0] <= since), default=(0, 0))
        for at, old in files.items():
            if at < counted:
                old.unlink(missing_ok=True)

    def keep_model(self, tensors: dict[str, Tensor]) -> None:
        """Write the site's own model, by the names of its parameters; it stays when the run is over."""
        own = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        write_atomic(self.folder / OWN_MODEL, save(own))

    def forget(self) -> None:
        """Drop every state: the run is over."""
        for one in self._files().values():
            one.unlink(missing_ok=True)


def commitment(records: Records, salt: bytes) -> str:
    """HMAC-SHA-256 over a site's encoded records, their order included: what its ledger is tied to.

    It says nothing about the records without the secret salt. A null row counts as null, whatever it holds.
    """
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
    if records.members is not None:  # whose they are
        digest.update(f"members {tuple(records.members.shape)};".encode() + _bytes(records.members))
    return digest.hexdigest()


def _bytes(part: Tensor) -> memoryview:
    return memoryview(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
