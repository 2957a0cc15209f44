"""The methods that come with sordino; those of the fairness papers each with and without privacy.

λ, μ, α and q are options of the parts: ``clip = {name = "fair", weight = 0.1}``, ``local = {name = "fedprox", mu =
0.01}``, ``aggregate = {name = "q-ffl", q = 0.5}``, ``ask = {name = "loss", batch = "step"}`` in a study.
"""

from __future__ import annotations

from typing import Any

from sordino.client import clip, local
from sordino.methods import asking, selection
from sordino.methods.method import Calibrate, Method
from sordino.methods.registry import register
from sordino.server import fair
from sordino.server.after import ball
from sordino.server.rules import RULES, uniform


def _add(name: str, summary: str, **parts: Any) -> None:
    register(Method(name, summary=summary, **parts))


def _add_chosen(name: str, summary: str, select: selection.Selection, *ask: asking.Ask) -> None:
    """A method that draws clients: their updates are averaged, because the draw already weighs them."""
    _add(name, summary, select=select, ask=ask, aggregate=uniform())


_add("fedavg", "Federated averaging without privacy: the ceiling. NOT PRIVATE.", private=False)
_add("dp-fedavg", "Every client its own noise; updates weighted by size.")
_add(
    "minimum-epsilon",
    "Everyone uses the noise of the strictest client; updates weighted by size.",
    calibrate=Calibrate(strictest=True),
)

_add_chosen("uniform", "A few clients a round, all equally likely.", selection.uniform())
_add_chosen("unbiased", "A few clients a round, drawn in proportion to their records.", selection.unbiased())
_add_chosen(
    "unbiased-compensated",
    "Privacy-aware draws with importance weights that keep the objective unbiased.",
    selection.compensated(),
)
_add_chosen("privacy-aware", "Draws clients to balance bias against noise (Problem 1).", selection.privacy_aware())
_add_chosen(
    "power-of-choice",
    "Of some candidates, those with the largest released loss take part.",
    selection.power_of_choice(),
    asking.candidate_loss(),
)

for _name, _summary in {
    "weiavg": "Updates weighted by ε.",
    "pfa": "Noisy updates projected on the directions of the less noisy ones.",
    "pfa-plus": "PFA in the basis of the round before: private clients upload a few coefficients.",
    "robust-hdp": "Noise estimated by principal component pursuit; updates weighted by its inverse.",
    "factor-hdp": "Noise estimated by factor analysis; updates weighted by its inverse (ours).",
    "random-effects": "Weights 1/(σ² + τ²): noise against how much clients differ (ours).",
    "declared-variance": "Updates weighted by the inverse of the noise that clients declare.",
    "column-norm": "Updates weighted by the inverse of their squared norm.",
    "optimum": "The oracle: inverse of the noise a simulation really used. Simulation only.",
}.items():
    _halves: dict[str, Any] = {"local": local.projected()} if _name == "pfa-plus" else {}
    _add(_name, _summary, aggregate=RULES[_name](), **_halves)

_add(
    "adaptdp",
    "The clipping radius follows the released root mean square of gradient norms (AdaptDP-FedAvg).",
    ask=asking.squared_norm(),
    clip=clip.moving(),
    server=ball(),
)
_add(
    "quantile-clipping",
    "The clipping radius follows a released quantile of gradient norms.",
    ask=asking.under_radius(),
    clip=clip.moving(),
)
_add("auto-clipping", "Every record's gradient is normalised (AUTO-S): no radius to tune.", clip=clip.automatic())

_add(
    "fedfair",
    "Clients whose loss is above the mean take longer steps. NOT PRIVATE.",
    ask=asking.exact_loss("step"),
    local=local.fair_step(),
    private=False,
)
_add(
    "fedfdp",
    "Records whose loss is above the released mean count more, within the clip (fair clipping).",
    ask=asking.loss(),
    clip=clip.fair(),
)
_scaffold: dict[str, Any] = {"local": local.scaffold(), "aggregate": fair.scaffold()}
_add("scaffold", "Control variates against client drift. NOT PRIVATE.", private=False, **_scaffold)
_add("dp-scaffold", "Control variates against client drift, made of released gradients.", **_scaffold)
_fedprox = local.fedprox()
_add("fedprox", "Local steps are pulled back to the server's weights. NOT PRIVATE.", private=False, local=_fedprox)
_add("dp-fedprox", "Private local steps are pulled back to the server's weights.", local=_fedprox)
_feddyn: dict[str, Any] = {"local": local.feddyn(), "aggregate": fair.feddyn()}
_add(
    "feddyn", "Local objectives are tilted until clients agree with the server. NOT PRIVATE.", private=False, **_feddyn
)
_add("dp-feddyn", "Local objectives are tilted by released gradients until clients agree with the server.", **_feddyn)
_add(
    "q-ffl",
    "Clients with a larger loss count more, by its q-th power. NOT PRIVATE.",
    ask=asking.exact_loss(),
    aggregate=fair.q_ffl(),
    private=False,
)
_add(
    "dp-q-ffl",
    "Clients with a larger released loss count more, by its q-th power.",
    ask=asking.loss(),
    aggregate=fair.q_ffl(),
)
_add(
    "ali-dpfl",
    "The number of local steps follows a convergence bound, under the budget's total.",
    aggregate=fair.ali_dpfl(),
)
