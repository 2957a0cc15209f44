"""The leaderboard: a claim only where intervals have one, the best block of a method, and what stays below print."""

import pytest

from papers import accuracy_published as published
from papers import leaderboard
from papers.experiment import Entry
from papers.leaderboard import Board, lines, rows

BOARD = Board(
    "a benchmark", ("accuracy/published", published.FAIR), "fedfdp/table4", {"one": "one step", "two": "tanh"}
)
PRINTED = {"MNIST": 95.13, "FashionMNIST": 85.99, "CIFAR10": 54.21}


def entry(block, row, column, values):
    key = "record_accuracy"
    return Entry(
        (block, row, column), {key: sum(values) / len(values)}, {}, len(values), {}, {key: dict(enumerate(values))}
    )


def table(*given):
    """By row: how far each column is from print, seed by seed."""
    found = {}
    for block, row, offsets in given:
        for column, best in PRINTED.items():
            found[block, row, column] = entry(block, row, column, [best + one for one in offsets[column]])
    return found


def same(offsets):
    return dict.fromkeys(PRINTED, offsets)


@pytest.fixture
def shown(monkeypatch):
    def show(auto, paper):
        both = {"accuracy/published": auto, "fedfdp/table4": paper}
        monkeypatch.setattr(leaderboard, "measured", both.__getitem__)
        monkeypatch.setattr(leaderboard, "BOARDS", (BOARD,))
        return list(lines())

    return show


def test_print_is_the_best_of_the_papers_methods_in_each_column():
    assert BOARD.printed == PRINTED


def test_rows_stand_by_their_means_with_intervals_and_print_among_them(shown):
    auto = table((published.FAIR, published.AUTO, same([2.0, 3.0, 4.0])))
    paper = table(("one", "FedAvg", same([-2.0, -2.2, -1.8])))
    found = [line for line in shown(auto, paper) if line.startswith("| ") and "method" not in line]
    assert [line.split(" | ")[0] for line in found] == [
        "| `auto`, noise per site", "| *the best printed of each column*", "| FedAvg, one step",
    ]  # fmt: skip
    assert "+3.0 [+0.5, +5.5] | 3 of 3 | 3 |" in found[0]
    assert "0 of 3" in found[2]


def test_one_seed_gets_no_verdict_however_far_it_is_above(shown):
    said = shown(table((published.FAIR, published.AUTO, same([30.0]))), {})
    (row,) = [line for line in said if "auto" in line and line.startswith("|")]
    assert row.endswith("| no verdict | one seed |")
    assert any(line.startswith("Nothing is above print on MNIST; FashionMNIST; CIFAR10.") for line in said)


def test_a_method_stands_once_in_its_best_block_and_only_with_every_column(shown):
    paper = table(("one", "FedAvg", same([-2.0, -2.0])), ("two", "FedAvg", same([-1.0, -1.0])))
    paper |= {("one", "FedDyn", "MNIST"): entry("one", "FedDyn", "MNIST", [99.0, 99.0])}
    shown({}, paper)
    assert [row.name for row in rows(BOARD)] == ["FedAvg, tanh"]


def test_what_noise_per_site_does_not_reach_is_named_with_its_interval(shown):
    alone = {**same([2.0, 2.1]), "CIFAR10": [-0.5, -0.52]}
    auto = table((published.FAIR, published.AUTO, alone), (published.FAIR, published.SHARED, same([5.0, 5.1])))
    said = " ".join(shown(auto, {}))
    assert "Every column is above print; with noise per site not: CIFAR10 (below (-0.5 [" in said
