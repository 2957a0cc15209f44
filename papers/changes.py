"""What was found wrong or unsaid on a page of results, and what became of it; numbers come from the page's JSON file.

A note stays for good; what it says of numbers that await a rerun stays as long as they were made before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from papers import fedfdp_published

Results = Mapping[str, Any]
Note = Callable[[Results], str]
DATE = "2026-11-18"
AWAITS = " The numbers above were made before that and await a rerun."
SHARED_COLUMNS = {0: 0, 2: 3}
"""Columns of FedFDP's Tables II and IV that Tables III and V print again, by place: MNIST and CIFAR10 at Dir(0.1)."""


def of(name: str, results: Results) -> list[str]:
    """The notes of a page, each with its date."""
    old = results["_meta"]["date"] < DATE
    return [f"{DATE}: {note(results)}{AWAITS if old and waits else ''}" for note, waits in NOTES.get(name, ())]


def _spent(results: Results) -> str:
    spent = {r["column"]: r["privacy"]["most_spent_epsilon"] for r in results["runs"] if r["row"] == "ALI-DPFL"}
    told = ", ".join(f"{value:.2f} on {column}" for column, value in spent.items())
    return (
        f"ALI-DPFL does not spend its budget: it plans five steps a round and may take fewer (ε spent: {told}). The "
        "method can now go on until every planned step is taken (`whole_budget`), and the experiment has it."
    )


def _replace_one(results: Results) -> str:
    most: dict[str, float] = {}
    for run in results["runs"]:
        labels = (run["block"], *run["column"].split(", "))
        epsilon = next(word for word in labels if word.startswith("ε"))
        most[epsilon] = max(most.get(epsilon, 0.0), run["privacy"]["most_replace_one_epsilon"])
    told = ", ".join(f"{value:.1f} for {epsilon}" for epsilon, value in most.items())
    return (
        "The paper's guarantee is replace-one; ε here is zero-out, which promises less. In the paper's terms it is at "
        f"most {told} (the largest over these runs)."
    )


def _same_cells(results: Results) -> str:
    said = []
    for one, other, first, second in (
        (fedfdp_published.TABLE_2, fedfdp_published.TABLE_3, "II", "III"),
        (fedfdp_published.TABLE_4, fedfdp_published.TABLE_5, "IV", "V"),
    ):
        for row, values in one.items():
            for here, there in SHARED_COLUMNS.items():
                for k, what in enumerate(("accuracy", "Ψ")):
                    a, b = values[2 * here + k], other[row][2 * there + k]
                    if a != b and results["_meta"]["name"].endswith(("table2", "table3")) == (first == "II"):
                        said.append(
                            f"{row} {('MNIST', '', 'CIFAR10')[here]} {what} {a:g} in {first}, {b:g} in {second}"
                        )
    return (
        f"The paper prints two numbers for one cell: {'; '.join(said)}. Both stand beside our one number, as printed."
    )


def _says(sentence: str) -> Note:
    return lambda results: sentence


def _dynamics(results: Results) -> str:
    return (
        "Runs that jumped on the GPU between two looks are dynamics, not memory. On an H200 FedFair with λ = 1 (deal "
        "0, MNIST, Dir(0.1)) diverges to the same 3.8·10³⁰ with recorded graphs or without, with uninitialised memory "
        "filled with NaN or not, and does not without the kernels: rounding decides, for a client whose loss grows "
        "takes longer steps. Algorithms of the GPU's libraries that are not deterministic made every run a little "
        "different; with torch.use_deterministic_algorithms two runs of 2,000 rounds agree in every bit, at 5–15 % "
        "more time. FedFair's step can now be bounded (`local.most`)."
    )


_PHASE = (
    _says(
        "All runs were made again. 'A tenth of the budget to phase 1' was a tenth of Σ count·q²/z², which is no tenth"
        " of ε where a few releases with little noise stand beside many: on T2 nearly all of ε went to phase 1, and "
        "what was lost there said nothing about the method. Shares are now measured with the accountant "
        "(`calibrate.shares`)."
    ),
    False,
)
_CURVES = (
    _says(
        "All runs were made again. They are Table 2's to the last bit, looked at more often: how often somebody looks"
        " no longer changes what a run draws, for which this page and Table 2 once disagreed."
    ),
    False,
)
WRONG_RATE = (
    "All runs were made again. In the page's former runs unbiased selection with tight noise had the wrong learning "
    "rate, chosen from four by the images that the table reports"
)
_OTHER = (_replace_one, False)
_CELLS = (_same_cells, False)
_ALI = (_spent, True)
NOTES: dict[str, tuple[tuple[Note, bool], ...]] = {
    "selection/table3": (
        (_says(f"{WRONG_RATE}; privacy-aware selection's lead was smaller than that page said."), False),
    ),
    "selection/table4": ((_says(f"{WRONG_RATE}."), False),),
    "robust-hdp/table8": (
        (
            _says(
                "The runs of the first block could not be made any more ('calibrate has no option by'); they can again."
            ),
            False,
        ),
    ),
    "robust-hdp/table9": (
        (
            _says(
                "The page described a block with clients alike and a row 'WeiAvg with our steps', neither of which it "
                "has."
            ),
            False,
        ),
    ),
    "fedfdp/table2": ((_dynamics, False), _CELLS),
    "fedfdp/table3": ((_dynamics, False), _CELLS),
    "fedfdp/table4": (_ALI, _CELLS),
    "fedfdp/table5": (_ALI, _CELLS),
    "fedfdp/table6": (_ALI,),
    "fedfdp/figure3": ((_says("That η = 10 and an average of the last models are ours was not said."), False),),
    "fedfdp/figure4": ((_says("That η = 1/C and an average of the last models are ours was not said."), False),),
    "fedfdp/figure5": ((_says("That η = 10 and an average of the last models are ours was not said."), False),),
    "adaptdp/table2": (_PHASE, _OTHER),
    "adaptdp/table3": (_PHASE, _OTHER),
    "adaptdp/table4": (
        (
            _says(
                "The paper sets 'the number of training samples per client to n_train = 3000, 6000, 9000' for P = 2, "
                "4, 6. This table reads them as totals, 1500 a client, without having said so: n_train is the total in "
                "the rest of the paper, and its column P = 2 repeats Table 2's numbers, which are of 3000 in all. The "
                "sentence's own reading is now a block of its own."
            ),
            False,
        ),
        _OTHER,
    ),
    "adaptdp/table5": (_OTHER,),
    "adaptdp/figure1": (
        _CURVES,
        _OTHER,
    ),
    "adaptdp/figure2": (_OTHER,),
}
