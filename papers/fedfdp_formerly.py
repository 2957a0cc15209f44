"""What FedFDP's pages say of runs that were made before values were searched as they are now; goes when they are."""

from __future__ import annotations

HONEST = (
    "Every method takes the rounds that ε pays for at z = 2 by the tight accountant: 914 without a released loss, 803 "
    "with one (FedFDP, q-FFL). The paper counts the gradient only: 782 by its own formula.",
    "The factor of a record never falls below zero, the loss bound follows 2.5 times the released mean (the paper's "
    "shrinks to nothing), both as the guarantee needs it.",
    "The paper's C = 0.1 with η = 1 hardly moves the model in so few rounds (84 per cent on MNIST). C and η are "
    "searched for every method alike, in four pairs: C from 0.1 to 1.6 on MNIST and FashionMNIST, 1 to 5 on CIFAR10, "
    "at steps ηC of like length (FedDyn, whose dual variables add to its steps, and q-FFL, which divides by their "
    "length, have pairs of their own). What is shown of every method is an average of its last models (decay 0.98), "
    "which is free.",
    "λ and q are not given: searched by accuracy on a seed of its own; μ and α neither: 0.1 (with α = 0.01 FedDyn was "
    "8 points worse on MNIST and FashionMNIST). With five local steps, and with tanh, methods take the values found "
    "with one and ReLU. ALI-DPFL plans five local steps and sets them itself. With one local step FedProx is FedAvg: "
    "the second block has five.",
    "'q-FFL, corrected' is not in the paper: the declared noise is taken out of its step length.",
    "The third block is not in the paper: the same network with tanh where it has ReLU, which is kinder to noise.",
    "Accuracy counts all test records alike. The paper's Ψ of 1e6 to 1e11 is an artefact of diverging losses: compare "
    "Ψ inside one table only.",
)
OPEN_CHOICES = (
    "The paper gives η = 0.1 and neither rounds nor local steps. The first block has one step of q = 0.05 a round, as "
    "its private tables do, and 2000 rounds; the second one epoch, 20 steps, and 100 rounds: as many gradients.",
    "With 20 steps of η = 0.1 SCAFFOLD diverges on every data set, FedDyn on MNIST and CIFAR10 and FedFair on CIFAR10 "
    "(Dir(0.1), 10 clients): there η = 0.02, also in Table III.",
    "λ and q are not given: searched by accuracy on a seed of its own; μ and α neither: 0.1. With one local step and "
    "this α FedDyn diverges or hardly learns, and FedProx is FedAvg.",
)
READING = (
    "The printed header is scrambled: by the numbers the columns are MNIST with Dir(0.1) and Dir(0.5), FashionMNIST "
    "with Dir(1), and CIFAR10 with 10, 20 and 50 clients at Dir(0.1). Searched values are those of Dir(0.1) "
    "and 10 clients.",
)
