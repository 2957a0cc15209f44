"""Levels of consent: people of one client who allow different ε. Run it: python examples/levels.py"""

import numpy as np

import sordino as sd

LEVELS = {"strict": 0.5, "standard": 1.0, "generous": 4.0}

clients = sd.data.load("digits").partition("dirichlet", clients=4, beta=1.0, seed=0)
# In real files a column says it: sd.data.from_folder(…, also=["consent"]).with_levels(LEVELS, column="consent").
# Whoever says nothing that is a level is of the strictest.
answers = np.random.default_rng(0).choice([*LEVELS, "no answer"], len(clients.x), p=[0.3, 0.4, 0.2, 0.1])
levels = clients.with_levels(LEVELS, answers.tolist())
strictest = clients.with_budgets(min(LEVELS.values()))

for told, federation in (("levels", levels), ("everybody as strict", strictest)):
    run = sd.train(federation, model="logistic", method="dp-fedavg", rounds=60, rate=0.1, lr=1.0, seed=0)
    noise = run.privacy[0]["releases"][0]["noise"]
    print(f"{told}: noise {noise:.2f}, accuracy {run.result['final']['accuracy']:.1%}")
    for level in run.privacy[0].get("levels", ()):
        print("  {level}: {records} records, rate {rate:.3f}, ε {spent_epsilon:.3f} of {epsilon:g}".format(**level))
