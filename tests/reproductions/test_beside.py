"""Papers and benchmarks are in a checkout only; a library without one says how to get them."""

import subprocess
import sys

import pytest

from sordino import beside
from sordino.errors import BadInput


@pytest.mark.parametrize("name", ["papers", "bench"])
def test_without_a_checkout_the_message_says_how_to_get_one(monkeypatch, tmp_path, name):
    monkeypatch.setattr(beside, "CHECKOUT", tmp_path)
    with pytest.raises(BadInput, match=r"clone sordino's repository .*pip install -e"):
        beside.beside(name)


def test_in_a_checkout_they_are_importable_from_anywhere(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import bench, papers"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
