"""result.json: one schema, checked when it is written and when it is read; results of schema 1 still open."""

import hashlib
import json
import math

import pytest
from report_fixture import result as of_schema_1

import sordino as sd
from sordino.errors import BadInput
from sordino.study.result import Result, complete, read_result, to_json

QUICK = {"rounds": 2, "rate": 0.3, "lr": 0.3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    clients = sd.data.load("digits").subset(300, 0).partition("iid", clients=3, seed=0)
    clients = clients.with_budgets([1.0, math.inf, 4.0], delta=1e-4)
    out = tmp_path_factory.mktemp("run") / "here"
    return sd.train(clients, "logistic", out=out, **QUICK), out


def test_a_result_is_read_as_it_was_written(run):
    done, out = run
    assert read_result(out / "result.json") == done.result == sd.load(out).result
    assert set(done.result) == Result.__required_keys__ | {"baselines"}
    assert done.result["schema"] == 2
    assert done.result["evaluation"] is None
    assert {one["trust"] for one in done.privacy} == {"against the server and all other sites together"}
    assert all(one["own_epsilon"] == one["spent_epsilon"] for one in done.privacy)
    assert done.privacy[1]["epsilon"] == math.inf
    assert json.loads((out / "result.json").read_text())["privacy"][1]["epsilon"] is None


def test_the_checksum_is_that_of_the_weights(run):
    done, _ = run
    body = done.weights.numpy().astype("<f4").tobytes()
    assert done.result["checksum"] == hashlib.sha256(body).hexdigest()


def test_weights_that_are_not_the_results_are_refused(run, tmp_path):
    done, _ = run
    done.save(tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-4] + bytes([1, 2, 3, 4]))
    with pytest.raises(BadInput, match="checksum differs"):
        sd.load(tmp_path / "model.safetensors")


def test_a_client_has_the_attackers_view_and_public_data_none(run):
    views = [one["attack"] for one in run[0].privacy]
    assert views[1] is None
    assert 0.5 < views[0]["success"] < views[2]["success"] < 1
    assert 0.01 < views[0]["true_positives"] < views[2]["true_positives"] < 1
    assert views[0]["from"] == "releases"


def test_a_result_of_schema_1_opens(tmp_path):
    old = of_schema_1("dp-fedavg", clients=3, rounds=2, public=1)
    (tmp_path / "result.json").write_text(to_json(old))
    found = read_result(tmp_path / "result.json")
    assert (found["schema"], found["checksum"], found["evaluation"]) == (2, None, None)
    assert found["final"] == old["final"]
    assert found["privacy"][0]["epsilon"] == math.inf
    assert found["privacy"][1] == {**old["privacy"][1], "trust": None, "own_epsilon": None}
    assert sd.Run(found, None, None).report(tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda r: r.pop("seconds"), "result.seconds is missing"),
        (lambda r: r["privacy"][1].update(delta="small"), r"result.privacy\[1\].delta is 'small'"),
        (lambda r: r["rounds"][0].update(round=True), r"result.rounds\[0\].round is True"),
        (lambda r: r.update(final=[]), "result.final is"),
        (lambda r: r.update(schema=3), "a newer sordino wrote it"),
    ],
)
def test_what_is_no_result_is_refused_with_the_key(run, tmp_path, spoil, told):
    table = json.loads(to_json(run[0].result))
    spoil(table)
    (tmp_path / "result.json").write_text(json.dumps(table))
    with pytest.raises(BadInput, match=r"result\.json is not a result of sordino.*" + told):
        read_result(tmp_path / "result.json")


def test_a_result_that_lacks_something_is_not_written(run):
    with pytest.raises(ValueError, match=r"result\.final is missing"):
        complete({"privacy": []}, None)


def test_a_result_written_in_pieces_is_the_same_text():
    from sordino.study.result import json_pieces, to_json

    table = {"a": [], "b": [1.5, [2, {"x": "line\nbreak é"}], {}], "c": {"d": [1, 2], "e": float("inf")}, "f": None}
    for one in (table, {}, {"only": [{"deep": [{"er": 1}]}]}):
        assert b"".join(json_pieces(one)).decode() == to_json(one, indent=1)
        assert b"".join(json_pieces(one, entries=1)).decode() == to_json(one, indent=1)
