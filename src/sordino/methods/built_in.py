"""The methods that come with sordino, by name; those of the fairness papers each with and without privacy.

λ, μ, α and q are options of the parts: ``clip = {name = "fair", weight = 0.1}``, ``local = {name = "fedprox", mu =
0.01}``, ``aggregate = {name = "q-ffl", q = 0.5}``, ``ask = {name = "loss", batch = "step"}`` in a study.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sordino.client import clip, corrections, local, moments
from sordino.client import personal as own
from sordino.methods import asking, selection
from sordino.methods.calibrate import Calibrate
from sordino.server import after, estimated, fair, pace, personal, projected, random_effects, rules
from sordino.server import moments as solving

OPEN = {"private": False}

PARTS_OF: dict[str, Callable[[], dict[str, Any]]] = {
    "auto": lambda: {
        "clip": clip.automatic(),
        "aggregate": rules.balanced(),
        "server": after.recent(),
        "defaults": {**dict.fromkeys(("rounds", "rate", "lr", "clip", "evaluate"), "auto"), "cooldown": 0.5},
    },
    "fedavg": lambda: OPEN,
    "dp-fedavg": dict,
    "minimum-epsilon": lambda: {"calibrate": Calibrate(strictest=True)},
    # The draw already weighs clients: their updates are averaged.
    "uniform": lambda: {"select": selection.uniform(), "aggregate": rules.uniform()},
    "unbiased": lambda: {"select": selection.unbiased(), "aggregate": rules.uniform()},
    "unbiased-compensated": lambda: {"select": selection.compensated(), "aggregate": rules.uniform()},
    "privacy-aware": lambda: {"select": selection.privacy_aware(), "aggregate": rules.uniform()},
    "power-of-choice": lambda: {
        "select": selection.power_of_choice(),
        "ask": asking.candidate_loss(),
        "aggregate": rules.uniform(),
    },
    "weiavg": lambda: {"aggregate": rules.weiavg()},
    "pfa": lambda: {"aggregate": projected.pfa()},
    "pfa-plus": lambda: {"local": local.projected(), "aggregate": projected.pfa_plus()},
    "robust-hdp": lambda: {"aggregate": estimated.robust_hdp()},
    "factor-hdp": lambda: {"aggregate": estimated.factor_hdp()},
    "random-effects": lambda: {"aggregate": random_effects.random_effects()},
    "declared-variance": lambda: {"aggregate": rules.declared_variance()},
    "column-norm": lambda: {"aggregate": estimated.column_norm()},
    "optimum": lambda: {"aggregate": rules.optimum()},
    "adaptdp": lambda: {"ask": asking.squared_norm(), "clip": clip.moving(), "server": after.ball()},
    "quantile-clipping": lambda: {"ask": asking.under_radius(), "clip": clip.moving()},
    "auto-clipping": lambda: {"clip": clip.automatic()},
    "fedfair": lambda: {"ask": asking.exact_loss("step"), "local": local.fair_step(), **OPEN},
    "fedfdp": lambda: {"ask": asking.loss(), "clip": clip.fair()},
    "scaffold": lambda: {"local": corrections.scaffold(), "aggregate": fair.scaffold(), **OPEN},
    "dp-scaffold": lambda: {"local": corrections.scaffold(), "aggregate": fair.scaffold()},
    "fedprox": lambda: {"local": corrections.fedprox(), **OPEN},
    "dp-fedprox": lambda: {"local": corrections.fedprox()},
    "feddyn": lambda: {"local": corrections.feddyn(), "aggregate": fair.feddyn(), **OPEN},
    "dp-feddyn": lambda: {"local": corrections.feddyn(), "aggregate": fair.feddyn()},
    "q-ffl": lambda: {"ask": asking.exact_loss(), "aggregate": fair.q_ffl(), **OPEN},
    "dp-q-ffl": lambda: {"ask": asking.loss(), "aggregate": fair.q_ffl()},
    "ali-dpfl": lambda: {"aggregate": pace.ali_dpfl()},
    "least-squares": lambda: {
        "local": moments.moments(),
        "clip": clip.automatic(),
        "aggregate": solving.least_squares(),
    },
    "mr-mtl": lambda: {"local": own.mr_mtl()},
    "fine-tuned": lambda: {"local": own.fine_tuned(), "aggregate": personal.fine_tuned()},
}
"""By method, the parts that are not plain: every client in every round, flat clipping, descent, averaging by size."""

SUMMARIES = {
    "auto": "Sets itself from public facts: rounds, batches, steps; weights that balance noise (ours, the default).",
    "fedavg": "Federated averaging without privacy: the ceiling. NOT PRIVATE.",
    "dp-fedavg": "Every client its own noise; updates weighted by size.",
    "minimum-epsilon": "Everyone uses the noise of the strictest client; updates weighted by size.",
    "uniform": "A few clients a round, all equally likely.",
    "unbiased": "A few clients a round, drawn in proportion to their records.",
    "unbiased-compensated": "Privacy-aware draws with importance weights that keep the objective unbiased.",
    "privacy-aware": "Draws clients to balance bias against noise (Problem 1).",
    "power-of-choice": "Of some candidates, those with the largest released loss take part.",
    "weiavg": "Updates weighted by ε.",
    "pfa": "Noisy updates projected on the directions of the less noisy ones.",
    "pfa-plus": "PFA in the basis of the round before: private clients upload a few coefficients.",
    "robust-hdp": "Noise estimated by principal component pursuit; updates weighted by its inverse.",
    "factor-hdp": "Noise estimated by factor analysis; updates weighted by its inverse (ours).",
    "random-effects": "Weights 1/(σ² + τ²): noise against how much clients differ (ours).",
    "declared-variance": "Updates weighted by the inverse of the noise that clients declare.",
    "column-norm": "Updates weighted by the inverse of their squared norm.",
    "optimum": "The oracle: inverse of the noise a simulation really used. Simulation only.",
    "adaptdp": "The clipping radius follows the released root mean square of gradient norms (AdaptDP-FedAvg).",
    "quantile-clipping": "The clipping radius follows a released quantile of gradient norms.",
    "auto-clipping": "Every record's gradient is normalised (AUTO-S): no radius to tune.",
    "fedfair": "Clients whose loss is above the mean take longer steps. NOT PRIVATE.",
    "fedfdp": "Records whose loss is above the released mean count more, within the clip (fair clipping).",
    "scaffold": "Control variates against client drift. NOT PRIVATE.",
    "dp-scaffold": "Control variates against client drift, made of released gradients.",
    "fedprox": "Local steps are pulled back to the server's weights. NOT PRIVATE.",
    "dp-fedprox": "Private local steps are pulled back to the server's weights.",
    "feddyn": "Local objectives are tilted until clients agree with the server. NOT PRIVATE.",
    "dp-feddyn": "Local objectives are tilted by released gradients until clients agree with the server.",
    "q-ffl": "Clients with a larger loss count more, by its q-th power. NOT PRIVATE.",
    "dp-q-ffl": "Clients with a larger released loss count more, by its q-th power.",
    "ali-dpfl": "The number of local steps follows a convergence bound, under the budget's total.",
    "least-squares": "One release of second moments per client; the server solves for a linear head.",
    "mr-mtl": "Every client keeps a model of its own, drawn to the released mean of all.",
    "fine-tuned": "Training together, then every client goes on alone from the common model.",
}
