"""The experiments of the four papers, by name."""

from __future__ import annotations

from sordino.study.reproduce.experiment import Experiment
from sordino.study.reproduce.papers import robust_hdp, selection

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (*selection.EXPERIMENTS, *robust_hdp.EXPERIMENTS)}
