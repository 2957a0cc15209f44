"""The demo: real handwritten digits, 12 clients, budgets from strict to generous, methods side by side."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from sordino.errors import BadInput
from sordino.study.compare import compare, comparison_table, plain_results
from sordino.study.file import Study, make_study
from sordino.study.progress import Live
from sordino.study.report import write
from sordino.study.run import plan

DATA: dict[str, Any] = {"name": "digits", "partition": "dirichlet", "clients": 12, "beta": 0.3, "minimum": 30}
BUDGETS = {"name": "dist2", "delta": 1e-5}
SHARED = {"noise": "shared", "colluders": DATA["clients"] // 2}
"""Half of all clients may conspire with the server."""
PIXELS = {"rate": 0.25, "steps": 2, "lr": 2.0, "clip": 0.2}
"""Settings that suit a linear model of the pixels, for the methods that do not set themselves."""


def demo_studies() -> tuple[Study, Study, Study]:
    """Digits, 12 clients, Dirichlet(0.3), budgets of Dist2: ``auto``, with shared noise too, and others set by hand."""
    common = {"data": DATA, "budgets": BUDGETS}
    ours = {"study": {"name": "demo"}, **common, "compare": {"methods": ["auto"]}}
    return (
        make_study(ours),
        make_study({**ours, "trust": SHARED}),
        make_study(
            {
                "study": {"name": "demo", "rounds": 40},
                **common,
                "model": {"name": "logistic"},
                "method": {"name": "dp-fedavg"},
                "training": PIXELS,
                "compare": {"methods": ["fedavg", "dp-fedavg", "robust-hdp"]},
            }
        ),
    )


def demonstrate(out: Path, console: Console, quiet: bool = False) -> list[dict[str, Any]]:
    """Plan, train, compare, report; returns the results. An earlier demo in ``out`` is replaced."""
    ours, together, others = demo_studies()
    if (out / "demo").exists():
        shutil.rmtree(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "demo").touch()
    except OSError as error:
        raise BadInput(f"cannot make the folder {out}: {error.strerror}; name another --out") from None
    console.print("[bold]The plan[/bold]: what every client will spend, before any record is touched\n")
    console.print(plan(ours.federation(), method=ours.chosen_method(), **ours.arguments()))
    console.print("\n[bold]Training[/bold]: the same clients and budgets under each method\n")
    with Live(console, quiet) as live:
        results = [*compare(others, out, live.watch), *compare(ours, out, live.watch)]
        shared = compare(together, out / "shared", live.watch)
    console.print(comparison_table([*results, *shared]))
    console.print(
        "auto sets itself from public facts and has fixed features of images; dp-fedavg and robust-hdp have a linear "
        "model of the pixels and settings made by hand. fedavg has no privacy: it shows the ceiling. With shared noise "
        "the server sees the sum of all updates alone, and promises hold while at most half of all clients conspire "
        "with it; without, they hold against everybody."
    )
    console.print(_verdict(results, shared), highlight=False)
    write(plain_results([*results, *shared]), out / "report.html")
    lines = (
        f"\nreport: {out / 'report.html'} (open it in a browser)",
        f"a client's statement: sordino ledger show {out / 'auto' / 'seed-0' / 'ledger.db'}",
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return [*results, *shared]


def _verdict(results: list[dict[str, Any]], shared: list[dict[str, Any]]) -> str:
    """In one line, how much accuracy privacy cost."""
    share = {one["method"]: 100 * one["final"]["accuracy"] for one in results}
    cost, other = share["fedavg"] - share["auto"], share["fedavg"] - share["dp-fedavg"]
    least = share["fedavg"] - 100 * shared[0]["final"]["accuracy"]
    return (
        f"[bold]privacy cost {cost:.0f} points of accuracy with auto[/bold] ({share['auto']:.0f} % of "
        f"{share['fedavg']:.0f} %), {least:.0f} where clients also share noise, and {other:.0f} with dp-fedavg, each "
        "client at its own ε"
    )
