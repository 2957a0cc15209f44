"""The colours of the report: visible on both themes, and told apart by people who see colours differently."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import pytest

STYLE = resources.files("sordino.study.report").joinpath("page.css").read_text()
BLOCKS = re.findall(r":root[^{]*\{(.*?)\n\}", STYLE, re.S)
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in BLOCKS)

# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
EYES = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / [0.95047, 1.0, 1.08883]
    root = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_marks_stand_out_from_the_card_and_text_can_be_read(theme):
    for method in range(8):
        assert contrast(theme[f"m{method}"], theme["card"]) >= 3.0
    for ink, ground in [
        ("ink", "card"), ("ink", "bg"), ("muted", "card"), ("muted", "bg"), ("link", "card"), ("link", "bg"),
        ("good", "good-bg"), ("good", "card"), ("bad", "bad-bg"), ("ink", "soft"), ("link", "soft"),
    ]:  # fmt: skip
        assert contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_methods_are_told_apart_whichever_way_colours_are_seen(theme, eyes):
    seen = [lab(np.array(EYES[eyes]) @ linear(theme[f"m{method}"])) for method in range(8)]
    for one, other in itertools.combinations(range(8), 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 12.0, (one, other)
