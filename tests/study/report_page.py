"""The report as tests read it: the page without the chart library, its data, its first screen, one client of it."""

from __future__ import annotations

import copy
import json
import re
from html import unescape

from sordino.study import report
from sordino.study.report.gather import grouped


def page_of(results) -> str:
    """The page without the chart library, as the tests read it."""
    page = report.render(results)
    before, rest = page.split('<script type="application/json" id="report-data">')
    data, after = rest.split("</script>", 1)
    return f"{before}<data>{data}</data>{after.rpartition('<script>')[2]}"


def data_of(results) -> dict:
    return json.loads(page_of(results).split("<data>")[1].split("</data>")[0])


def first_screen(results) -> str:
    page = page_of(results)
    return unescape(
        re.sub(r"<[^>]+>", " ", page[page.index('<div class="verdicts">') : page.index('<dl class="tiles">')])
    )


def chart(results, identity: str) -> dict:
    return next(one for one in data_of(results)["charts"] if one["id"] == identity)


def shown_client(results, place: int = 0):
    return grouped(results)[0].runs[0].clients[place]


def with_privacy(result: dict, **changes) -> dict:
    changed = copy.deepcopy(result)
    changed["privacy"][0].update(changes)
    return changed
