"""The table of settings says what the code does: every setting, its default, and what methods have of their own."""

import dataclasses
import re
from pathlib import Path

from sordino import methods
from sordino.methods import Training
from sordino.methods.auto import CHOSEN

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "settings.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \| ?(.*?) ?\| .+ \|$", PAGE, re.M)


def written(value):
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def test_every_setting_is_there_with_its_default():
    assert [(name, default) for name, default, _ in ROWS] == [
        (field.name, written(field.default)) for field in dataclasses.fields(Training)
    ]


def test_what_methods_have_of_their_own_is_there():
    own = {
        (name, method): str(value) for method in methods.names() for name, value in methods.get(method).defaults.items()
    }
    told = {(name, m): value for name, _, cell in ROWS for m, value in re.findall(r"`([\w-]+)`: (\S+?)(?:;|$)", cell)}
    assert told == own


def test_the_settings_that_may_be_auto_are_named():
    said = re.search(r"^(?:.*\n)?.*?((?:`\w+`(?:, | and )?)+) may be `\"auto\"`", PAGE, re.M).group(1)
    assert set(re.findall(r"`(\w+)`", said)) == set(CHOSEN)
