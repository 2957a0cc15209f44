"""The demo: real handwritten digits, 12 clients, budgets from strict to generous, methods side by side."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from sordino.errors import BadInput
from sordino.study.compare import compare, comparison_table, plain_results
from sordino.study.file import Study, make_study
from sordino.study.progress import Live
from sordino.study.report import write
from sordino.study.run import plan

METHODS = ["fedavg", "minimum-epsilon", "dp-fedavg", "robust-hdp", "random-effects"]


def demo_study() -> Study:
    """Digits, 12 clients, Dirichlet(0.3), budgets of Dist2."""
    return make_study(
        {
            "study": {"name": "demo", "rounds": 40},
            "data": {"name": "digits", "partition": "dirichlet", "clients": 12, "beta": 0.3, "minimum": 30},
            "budgets": {"name": "dist2", "delta": 1e-5},
            "model": {"name": "logistic"},
            "method": {"name": "dp-fedavg"},
            "training": {"rate": 0.25, "steps": 2, "lr": 2.0, "clip": 0.2},
            "compare": {"methods": METHODS},
        }
    )


def demonstrate(out: Path, console: Console, quiet: bool = False) -> None:
    """Plan, train, compare, report. An earlier demo in ``out`` is replaced."""
    study = demo_study()
    if (out / "demo").exists():
        shutil.rmtree(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "demo").touch()
    except OSError as error:
        raise BadInput(f"cannot make the folder {out}: {error.strerror}; name another --out") from None
    clients = study.federation()
    console.print("[bold]The plan[/bold]: what every client will spend, before any record is touched\n")
    console.print(plan(clients, method="dp-fedavg", **study.arguments()))
    console.print("\n[bold]Training[/bold]: the same clients and model under each method\n")
    with Live(console, quiet) as live:
        results = compare(study, out, live.watch)
    console.print(comparison_table(results))
    console.print(
        "minimum-epsilon makes everyone as noisy as the strictest client; dp-fedavg lets each use its own budget;\n"
        "robust-hdp and random-effects also trust noisy updates less. fedavg has no privacy: it shows the ceiling."
    )
    write(plain_results(results), out / "report.html")
    console.print(f"\nreport: [bold]{out / 'report.html'}[/bold] (open it in a browser)", highlight=False)
    console.print(
        f"a client's statement: sordino ledger show {out / 'dp-fedavg' / 'seed-0' / 'ledger.db'}", highlight=False
    )
