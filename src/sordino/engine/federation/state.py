"""A client's own state on the site's disk: control variates, duals. One file a turn, so that a turn can be taken again.

A state is made of releases alone, so it is no more secret than they are; it stays at the site because nobody needs it
elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sordino.engine.checkpoint import write_atomic
from sordino.errors import SordinoError

_NAME = re.compile(r"(\d{8})-(\d{4})\.safetensors")


class LocalState:
    """States of one run by (round, copy)."""

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
        if not self.names:
            return {}
        usable = [p for at, p in self._files().items() if at < (number, copy) and (at[0] <= since or at[0] == number)]
        if not usable:
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

    def forget(self) -> None:
        """Drop everything: the run is over."""
        for one in self._files().values():
            one.unlink(missing_ok=True)
