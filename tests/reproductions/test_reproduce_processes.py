"""Reproductions that several processes share: the same table, nothing left behind, nothing lost."""

import multiprocessing
import os
import signal

import pytest

import papers as reproduce
from papers.runner import Silent
from sordino.errors import BadInput, SordinoError
from sordino.study.schedule import dealt

SMALL = "adaptdp/table2"
"""Quick: six runs of three rounds."""


class Listens(Silent):
    """Counts rounds, and does something after the first."""

    def __init__(self, then=lambda: None):
        self.heard, self.then = [], then

    def begin(self, rounds, runs, what):
        self.heard.append(("begin", rounds, runs))

    def advance(self, rounds):
        self.heard.append(("advance", rounds))
        if len(self.heard) == 2:
            self.then()


def stop():
    raise KeyboardInterrupt


def kill_one():
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def numbers(done):
    return {entry.place: dict(entry.values) for entry in done.entries}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return reproduce.run(SMALL, folder, quick=True, data=folder)


def test_two_processes_give_the_same_table_and_tell_of_every_round(alone, tmp_path):
    watch = Listens()
    done = reproduce.run(SMALL, tmp_path, quick=True, data=tmp_path, processes=2, watch=watch)
    assert numbers(done) == numbers(alone)
    assert watch.heard[0] == ("begin", 18, 6)
    assert sum(told[1] for told in watch.heard[1:]) == 18
    assert done.about["notes"] == alone.about["notes"] != [], "what stood in for the data is known here too"
    assert multiprocessing.active_children() == []


def test_stopped_or_killed_it_leaves_nobody_behind_and_goes_on_in_stacks(alone, tmp_path):
    shared = {"quick": True, "data": tmp_path, "processes": 2, "stack": True}
    with pytest.raises(KeyboardInterrupt):
        reproduce.run(SMALL, tmp_path, watch=Listens(stop), **shared)
    assert multiprocessing.active_children() == []
    with pytest.raises(SordinoError, match="fewer --processes"):
        reproduce.run(SMALL, tmp_path, watch=Listens(kill_one), **shared)
    assert multiprocessing.active_children() == []
    done = reproduce.run(SMALL, tmp_path, **shared)
    for place, values in numbers(alone).items():
        for key, value in values.items():
            assert numbers(done)[place][key] == (None if value is None else pytest.approx(value, rel=1e-3)), place


def test_a_share_does_not_change_because_another_is_finished():
    cells = list({one.id: one for one in reproduce.get("robust-hdp/table8").planned(False, 1)}.values())

    def still(*waiting):
        ids = {one.id for share in waiting for one in share}
        return dealt(cells, lambda cell: cell.id not in ids, 3)

    first, second, third = still(cells)
    assert sorted(one.id for one in first + second + third) == sorted(one.id for one in cells)
    assert {one.method for one in first} == {one.method for one in cells}
    assert still(first, third) == [first, third]
    assert still(second[5:]) == [second[5:]]


def test_what_goes_wrong_in_a_process_is_said_here(tmp_path):
    with pytest.raises(BadInput, match=r"mnist|MNIST"):
        reproduce.run(SMALL, tmp_path, data=tmp_path, only="T3", seeds=1, processes=2)
    with pytest.raises(BadInput, match="processes is 0"):
        reproduce.run(SMALL, tmp_path, processes=0)
