"""The settings of training as keywords, so that editors complete them and type checkers know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from sordino.client.augment import Augment


class Settings(TypedDict, total=False):
    """Keywords of ``sd.train`` and ``sd.plan`` beside ``rounds``: the fields of :class:`~sordino.methods.Training`.

    None is the same as not given: what the method says for itself then holds, else the default of ``Training``.
    """

    batch: float | Sequence[float] | None
    rate: float | Sequence[float] | Literal["auto"] | None
    steps: int | None
    epochs: float | None
    lr: float | Literal["auto"] | None
    server_lr: float | None
    cooldown: float | None
    pull: float | None
    clip: float | Literal["auto"] | None
    sampling: Literal["poisson", "fixed", "full"] | None
    select: int | None
    evaluate: int | Literal["auto"] | None
    exact_noise: bool | None
    augment: Augment | Mapping[str, Any] | None
