"""Runs as two tidy tables, one row a run and one row a round: Parquet for programs, CSV for everything else."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from sordino.engine.checkpoint import write_atomic
from sordino.study.against import against, own_epsilon
from sordino.study.sweep import Finished
from sordino.study.track import METRICS

FINAL = (*METRICS, "train_loss", "train_psi")
SPENT = ("min", "median", "max")


def _named(run: Finished) -> dict[str, Any]:
    """What tells a run apart: its name, what varied, method and seed."""
    study = run.point.study
    method = (run.result or {}).get("method", study.method.name)
    return {"run": run.point.name, **run.point.values, "method": method, "seed": study.study.seed}


def runs_table(runs: Sequence[Finished]) -> pa.Table:
    """One row for each run: what varied, method, seed, the final model's figures, what clients spent, why it failed."""
    rows = []
    for run in runs:
        result = run.result or {}
        rows.append(
            {
                **_named(run),
                "private": result.get("private"),
                "rounds": result.get("study", {}).get("training", {}).get("rounds", run.point.study.planned_rounds),
                **{key: (result.get("final") or {}).get(key) for key in FINAL},
                **_spent(result),
                "seconds": result.get("seconds"),
                "failed": run.failed,
            }
        )
    return _table(rows, {"failed": pa.string(), "private": pa.bool_(), "trust": pa.string()})


def rounds_table(runs: Sequence[Finished]) -> pa.Table:
    """One row for each round of every run: what varied, the round, its figures where it was evaluated."""
    rows = []
    for run in runs:
        for record in (run.result or {}).get("rounds", ()):
            spent = record.get("spent_epsilon") or {}
            seen = {**(record.get("diagnostics") or {}), **(record.get("observer") or {})}
            rows.append(
                {
                    **_named(run),
                    "round": record["round"],
                    **{key: record.get(key) for key in METRICS},
                    **{f"spent_epsilon_{key}": spent.get(key) for key in SPENT},
                    "participants": len(record["participants"]),
                    "clip": record.get("clip"),
                    "noise_power": seen.get("noise_power"),
                }
            )
    return _table(rows)


def write_tables(runs: Sequence[Finished], out: Path) -> list[Path]:
    """``runs`` and ``rounds``, each as .parquet and .csv, in ``out``; every file whole or not at all."""
    written = []
    for name, table in (("runs", runs_table(runs)), ("rounds", rounds_table(runs))):
        for ending, write in (("parquet", pyarrow.parquet.write_table), ("csv", pyarrow.csv.write_csv)):
            held = io.BytesIO()
            write(table, held)
            path = out / f"{name}.{ending}"
            write_atomic(path, held.getvalue())
            written.append(path)
    return written


def _spent(result: Mapping[str, Any]) -> dict[str, Any]:
    """Budgets and what was spent of them, over the clients that have a finite budget; null without privacy."""
    bounded = [p for p in result.get("privacy", ()) if math.isfinite(p["epsilon"] or math.inf)]
    found: dict[str, Any] = {"clients": len(result.get("privacy", ())) or None}
    for name, key in (("budget", "epsilon"), ("spent", "spent_epsilon")):
        values = [float(p[key]) for p in bounded]
        told = (min(values), statistics.median(values), max(values)) if values else (None, None, None)
        found |= {f"{name}_epsilon_{word}": value for word, value in zip(SPENT, told)}
    return found | {
        "replace_one_epsilon_max": max((p["replace_one_epsilon"] for p in bounded), default=None),
        "delta_max": max((p["delta"] for p in bounded), default=None),
        "largest_share_spent": max((p["spent_epsilon"] / p["epsilon"] for p in bounded), default=None),
        "trust": "; ".join(against(result)) or None,
        "own_epsilon_max": own_epsilon(result),
        "budgets_ended": sum(p.get("budget_ends") is not None for p in bounded) if bounded else None,
    }


def _table(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column([row.get(name) for row in rows], (kinds or {}).get(name)) for name in names})


def _column(values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
    """One type for a column: truth, whole numbers, numbers, text, anything else as JSON. ∞ and NaN are null."""
    plain = [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]
    told = {type(v) for v in plain if v is not None}
    if kind is None:
        kind = (
            pa.float64() if not told
            else pa.bool_() if told == {bool}
            else pa.int64() if told == {int}
            else pa.float64() if told <= {int, float}
            else pa.string()
        )  # fmt: skip
    if kind == pa.string():
        plain = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in plain]
    return pa.array(plain, type=kind)
