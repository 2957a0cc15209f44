"""The experiments of the four papers, by name."""

from __future__ import annotations

from sordino.study.reproduce.experiment import Experiment
from sordino.study.reproduce.papers import adaptdp, fedfdp, robust_hdp, selection

PAPERS = (selection, robust_hdp, fedfdp, adaptdp)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for paper in PAPERS for one in paper.EXPERIMENTS}
