"""The report as a file: one page that points nowhere, small enough, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from decimal import Decimal

import pytest
import report_fixture as fixture
from report_page import page_of

from sordino.errors import BadInput
from sordino.study import report
from sordino.study.report.numbers import MAX_POINTS, plain, spread, thin


def test_the_five_questions_stand_in_their_order():
    page = page_of(fixture.comparison())
    places = [page.index(f'<section id="{name}"') for name in ("private", "good", "fair", "contributed", "run")]
    assert places == sorted(places)


def test_nothing_on_the_page_points_outside():
    page = page_of(fixture.comparison())
    assert not re.findall(r"""(?:src|href|url|import)\s*[=(]\s*["']?(?:https?:)?//""", page)


def test_a_large_comparison_stays_under_six_megabytes_with_short_series():
    methods = ("fedavg", *fixture.PRIVATE[:4])
    results = fixture.comparison(methods, (0, 1, 2), clients=100, rounds=500)
    for seed, result in enumerate(results):  # no two runs alike: nothing can be shared between seeds
        for entry in result["privacy"]:
            entry["delta"] = 1e-5 * (1 + seed / 100)
    page = report.render(results)
    assert len(page.encode()) < 6_000_000
    data = json.loads(page.split('id="report-data">')[1].split("</script>", 1)[0], parse_float=Decimal)
    assert len(data["clients"]["sheets"]) == 15
    (curves,) = (one for one in data["charts"] if one["id"] == "client-curves")
    assert all(len(client[3]) == 40 for method in curves["curves"] for client in method["clients"])
    for one in data["charts"]:
        if one is curves:
            continue
        if one["x"]["title"] == "round":
            assert max(len(trace["x"]) for trace in one["traces"]) <= 2 * MAX_POINTS  # a band goes out and back
        assert max(digits(y) for trace in one["traces"] for y in trace["y"]) <= 5


def digits(value: Decimal | int) -> int:
    return len(Decimal(value).normalize().as_tuple().digits)


def test_thinning_keeps_the_ends_and_the_limit():
    for count in (1, 2, 199, 200, 201, 500, 12_345):
        kept = thin(count)
        assert kept[0] == 0
        assert kept[-1] == count - 1
        assert len(kept) <= MAX_POINTS
        assert kept == sorted(set(kept))


def test_writing_replaces_the_file_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "new" / "report.html"
    assert report.write([fixture.result(rounds=2)], target) == target
    whole = target.read_text()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        report.write([fixture.result("fedavg", rounds=2)], target)
    assert target.read_text() == whole
    assert os.listdir(target.parent) == ["report.html"]


def test_a_place_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        report.write([fixture.result(rounds=2)], tmp_path / "file" / "report.html")


def test_the_package_does_not_import_plotly():
    check = "import sys, sordino.study.report; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_numbers_for_people():
    shown = [plain(value) for value in (None, math.nan, math.inf, 0, 0.00012345, 0.1, 2.5, 1234.5, 1e-5, 3.2e9, -0.25)]
    assert shown == ["–", "–", "∞", "0", "0.000123", "0.1", "2.5", "1,234", "1e−5", "3.2e9", "−0.25"]
    assert spread([1.0, None, 3.0]).deviation == pytest.approx(2**0.5)
    assert spread([None]) is None
