"""``sordino audit`` and ``sordino bench``: what is claimed of privacy and of speed, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from sordino.commands.output import AsCsv, AsJson, for_programs, shown, tell, words
from sordino.errors import BadInput
from sordino.study.show import Sheet


def audit(
    names: Annotated[list[str] | None, typer.Argument(help="Methods. Default: every private one.")] = None,
    epsilon: Annotated[float, typer.Option(help="The budget to audit at.")] = 2.0,
    canaries: Annotated[int, typer.Option(help="How many canaries.")] = 100_000,
    unit_records: Annotated[int, typer.Option(help="Records of a canary: above 1 it is a person.")] = 1,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Attack every method's real client step with canaries; fails when a proven lower bound exceeds the claimed ε."""
    from sordino.methods import get
    from sordino.methods import names as all_names
    from sordino.privacy.trust import EVERYBODY
    from sordino.study.audit import Trial, audit_method

    apart, rows = for_programs(as_json, as_csv), []
    of = "" if unit_records == 1 else f" of {unit_records} records"
    title = f"{canaries:,} canaries{of}, bounds true with 99 % confidence each"
    columns = ("method", "sampling", "claimed ε", "one-run", "Gaussian", "verdict")
    table = Sheet(columns, left=("sampling",), title=title, notes=[f"noise per site: claims hold {EVERYBODY}"])
    with shown.err.status("auditing") as status:
        for name in names or [n for n in all_names() if get(n).private]:
            for rate in (1.0, 0.1):
                status.update(f"auditing {name} at rate {rate:g}")
                trial = Trial(epsilon=epsilon, rate=rate, canaries=canaries, unit_records=unit_records)
                found = audit_method(name, trial)
                bounds = {"claimed": found.claimed, "one_run": found.one_run, "gaussian": found.gaussian}
                rows.append({"method": name, "sampling": "poisson", "rate": rate, **bounds, "passed": found.passed})
                verdict = Text("holds", "green") if found.passed else Text("BROKEN", "bold red")
                table.add_row(name, f"poisson {rate:g}", *(f"{value:.3f}" for value in bounds.values()), verdict)
    if apart:
        tell(as_csv, {"canaries": canaries, "epsilon": epsilon, "audits": rows}, rows)
    else:
        shown.out.print(table)
    raise typer.Exit(0 if all(row["passed"] for row in rows) else 1)


def bench(
    work: Annotated[str, typer.Option(help="Workloads, by comma: W1 to W4, W3-large-stem.")] = "W1,W2,W3,W4",
    peers: Annotated[
        str, typer.Option(help="Beside plain: plain-channels-last, opacus, ghost, vmap, flower, sordino-running, ….")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    deterministic: Annotated[bool, typer.Option(help="On a GPU: repeat rounds bit for bit, as runs do.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Counted passes, interleaved.")] = 3,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each in a process of its own.")] = True,
    growth: Annotated[bool, typer.Option("--growth", help="Instead: how time and memory grow.")] = False,
    many: Annotated[bool, typer.Option("--many", help="With --growth: also 100,000 clients (minutes).")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="With --growth: so many processes share the clients of a round.")
    ] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here; - prints them.")] = None,
    as_csv: AsCsv = False,
) -> None:
    """Time private rounds against plain PyTorch and other libraries, in the same minute, as ratios."""
    from sordino.beside import beside

    benchmark, printed = beside("bench"), str(json_file) == "-"
    apart = for_programs(printed, as_csv)
    if (many or processes > 1) and not growth:
        raise BadInput("--many and --processes go with --growth: add it, or leave them out")
    with shown.err.status("benchmarking") as status:
        if growth and device != "cpu":
            raise BadInput("--growth measures a CPU: leave --device out")
        if growth:
            curves = benchmark.growth.growth(show=status.update, many=many, processes=processes)
            found, table = {"growth": curves, "_meta": benchmark.about(1)}, benchmark.growth.growth_table(curves)
            rows = benchmark.growth.growth_rows(curves)
        else:
            how = {"device": device, "deterministic": deterministic}
            found = benchmark.bench(words(work), words(peers), repeats, memory, status.update, **how)
            table, rows = benchmark.comparison(found), benchmark.rows(found)
    if apart:
        tell(as_csv, found, rows)
    else:
        shown.out.print(table)
    if json_file and not printed:
        json_file.write_text(benchmark.to_text(found))
