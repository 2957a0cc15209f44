"""What a study says about the fixed map before its model, and what its result does."""

from __future__ import annotations

from typing import Any

from torch import nn

from sordino import models
from sordino.methods.identity import identity
from sordino.models.features import Spec


def with_features(options: dict[str, Any] | None, features: Spec | None) -> dict[str, Any] | None:
    """The model's options, with the features among them where they are given."""
    return options if features is None else {**(options or {}), "features": features}


def described(template: nn.Module) -> dict[str, Any]:
    """A model's features: name, options, shape, a hash of the numbers they hold; of one's own also of their code."""
    features = template.get_submodule("features")
    assert isinstance(features, models.Features)
    told = features.describe()
    return {**told, "code": identity(models.check_features(told["name"]))} if ":" in told["name"] else told
