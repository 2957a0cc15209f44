"""Predictions of a finished run: from raw files, row by row, by name or in the target's unit; deployed as simulated."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from sklearn.datasets import load_diabetes

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import ward_files
from federation_rig import Rig, simulated
from safetensors.torch import load_file, save_file

import sordino as sd
from sordino.data.encode import encode_table
from sordino.data.read import read_table
from sordino.data.schema import parse_schema
from sordino.engine.checkpoint import write_atomic
from sordino.engine.federation.limits import Policy
from sordino.errors import BadInput
from sordino.study.conduct import conduct, set_up
from sordino.study.file import make_study
from sordino.study.result import to_json

QUICK = {"rounds": 3, "rate": 0.3, "lr": 0.3}


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """A run over three sites' files, and records that no site has."""
    folder = tmp_path_factory.mktemp("wards")
    rows, labels = ward_files.write_sites(folder / "wards")
    clients = sd.data.from_folder(folder / "wards", ward_files.SCHEMA).with_budgets(dict(ward_files.SITES), delta=1e-4)
    run = sd.train(clients, rounds=20, out=folder / "run")
    return folder, run, rows, labels


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_from_raw_files_to_predictions_by_commands_alone(in_folder, tmp_path):
    rows, labels = ward_files.write_sites(tmp_path / "wards")
    ward_files.write(tmp_path / "new.csv", rows)
    (tmp_path / "study.toml").write_text(ward_files.STUDY)
    assert in_folder("-q", "run", "study.toml")[0] == 0
    code, out, err = in_folder("predict", "runs/wards", "new.csv", "--id", "patient")
    assert (code, err) == (0, "")
    found = table(out)
    assert list(found[0]) == ["row", "id", "prediction", "P(malignant)", "P(benign)", "reason"]
    assert [one["row"] for one in found] == [str(k + 1) for k in range(len(rows))]
    assert [one["id"] for one in found] == [row["patient"] for row in rows]
    assert {one["reason"] for one in found} == {""}
    for one in found:
        likely = {name: float(one[f"P({name})"]) for name in ward_files.CLASSES}
        assert sum(likely.values()) == pytest.approx(1.0, abs=1e-6)
        assert one["prediction"] == max(likely, key=lambda name: likely[name])
    right = np.mean([one["prediction"] == label for one, label in zip(found, labels)])
    assert right > 0.8
    code, _, err = in_folder("predict", "runs/wards", "new.csv", "--out", "found.csv")
    assert (code, "found.csv" in err) == (0, True)
    assert [one["prediction"] for one in table(Path("found.csv").read_text())] == [one["prediction"] for one in found]
    told = json.loads(in_folder("predict", "runs/wards", "new.csv", "--json")[1])
    assert [one["prediction"] for one in told] == [one["prediction"] for one in found]
    assert told[0]["reason"] is None


def test_records_are_encoded_as_training_records_were(wards, tmp_path):
    _, run, rows, labels = wards
    schema = parse_schema(ward_files.SCHEMA)
    file = ward_files.write(tmp_path / "labelled.csv", rows, labels)
    x, _, _ = encode_table(read_table(file, schema.columns), schema)
    expected = run.model(torch.from_numpy(x)).softmax(-1).detach().numpy()
    found = run.predict(file)  # a target that is there is not looked at
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-6)
    np.testing.assert_array_equal(
        run.predict(ward_files.write(tmp_path / "new.csv", rows)).prediction, found.prediction
    )


def test_every_kind_of_frame_gives_the_same(wards, tmp_path):
    folder, run, rows, _ = wards
    plain = ward_files.write(tmp_path / "new.csv", rows)
    expected = run.predict(plain)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    frame = pandas.read_csv(plain)
    pandas.read_csv(plain).to_csv(tmp_path / "packed.csv.gz", index=False)
    arrow = pa.table(columns)
    pyarrow.parquet.write_table(arrow, tmp_path / "new.parquet")
    order = [*ward_files.SCHEMA["numeric"], *ward_files.SCHEMA["categorical"]]
    mixed = frame.astype({"radius": object})
    mixed.loc[0, "radius"] = str(mixed.loc[0, "radius"])  # cells of two types in one column
    frames = {
        "pandas": frame,
        "of two types": mixed,
        "arrow": arrow,
        "dict": columns,
        "array": frame[order].to_numpy(dtype=object),
        "csv.gz": tmp_path / "packed.csv.gz",
        "parquet": str(tmp_path / "new.parquet"),
    }
    for kind, one in frames.items():
        found = run.predict(one)
        np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-6, err_msg=kind)
        assert found.reasons == expected.reasons, kind
    loaded = sd.load(folder / "run").predict(frame, id_column="patient")
    np.testing.assert_array_equal(loaded.prediction, expected.prediction)
    assert loaded.ids == tuple(row["patient"] for row in rows)
    shown = pandas.DataFrame(loaded.rows())
    assert shown["prediction"].tolist() == expected.prediction.tolist()


def test_rows_that_cannot_be_encoded_keep_their_place_and_say_why(wards, tmp_path):
    _, run, _, _ = wards
    lines = [
        "ward,radius,texture,smoothness,concavity",
        "a,12,18,0.1,0.05",
        "a,,18,0.1,0.05",  # missing, and there is no fill
        "b,large,18,0.1,0.05",
        "a,12,18,0.1",
        'a,"12,18,0.1,0.05',
        "",
        ",12,,0.1,",  # missing, and there is one
    ]
    (tmp_path / "odd.csv").write_text("\n".join(lines) + "\n")
    found = run.predict(tmp_path / "odd.csv")
    assert len(found) == 7
    assert found.missing == 5
    told = [
        "column 'radius': is missing",
        "column 'radius': large is not a number",
        "fewer cells",
        "quote",
        "empty line",
    ]
    for reason, words in zip(found.reasons[1:6], told):
        assert words in reason
    assert [one is None for one in found.prediction] == [False, *[True] * 5, False]
    assert np.isnan(found.probabilities[1:6]).all()
    assert np.isfinite(found.probabilities[[0, 6]]).all()
    rows = table(found.csv())
    assert [one["prediction"] == "" for one in rows] == [False, *[True] * 5, False]
    alone = run.predict({"ward": ["a"], "radius": [12], "texture": [18], "smoothness": [0.1], "concavity": [0.05]})
    np.testing.assert_allclose(alone.probabilities, found.probabilities[:1], atol=1e-6)
    (tmp_path / "empty.csv").write_text(lines[0] + "\n")
    assert run.predict(tmp_path / "empty.csv").csv() == "row,prediction,P(malignant),P(benign),reason\n"


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        ({"radius": [1.0]}, "has no column 'texture', which the model was trained with"),
        ({"radius": 1.0}, "needs one cell per record"),
        ({"radius": [1.0, 2.0], "texture": [1.0]}, "different lengths"),
        (np.zeros((2, 7)), "radius, texture, smoothness, concavity, ward"),
        ("records.xlsx", "ends in .csv"),
    ],
)
def test_records_of_another_kind_are_refused(wards, frame, told):
    with pytest.raises(BadInput, match=told):
        wards[1].predict(frame)


def test_whose_a_record_is_need_not_be_said_to_predict(tmp_path):
    rows, _ = ward_files.write_sites(tmp_path / "wards")
    schema = {**ward_files.SCHEMA, "unit": "patient", "unit_records": 2, "unit_name": "patient"}
    clients = sd.data.from_folder(tmp_path / "wards", schema).with_budgets(dict(ward_files.SITES), delta=1e-4)
    run = sd.train(clients, "logistic", **QUICK)
    bare = {name: [row[name] for row in rows] for name in rows[0] if name != "patient"}
    assert run.predict(bare).missing == 0
    assert run.result["records"]["schema"]["unit"] == "patient"


def test_an_edge_between_two_classes_moves_the_answer(wards, tmp_path):
    _, run, rows, _ = wards
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    likely = run.predict(columns).probabilities[:, 1]
    strict = run.predict(columns, threshold=0.9).prediction
    assert strict.tolist() == ["benign" if one >= 0.9 else "malignant" for one in likely]
    with pytest.raises(BadInput, match=r"needs \[evaluation\]"):
        run.predict(columns, threshold="chosen")
    with pytest.raises(BadInput, match="from 0 to 1"):
        run.predict(columns, threshold=3.0)
    chosen = sd.Run({**run.result, "threshold": {"edge": 0.9}}, run.weights, run.template)
    assert chosen.predict(columns, threshold="chosen").prediction.tolist() == strict.tolist()


@pytest.mark.parametrize("log", [[], ["log"]])
def test_a_number_comes_in_the_targets_own_unit(tmp_path, log):
    found = load_diabetes(scaled=False)
    for name, part in (("north", slice(0, 200)), ("south", slice(200, 442))):
        rows = [{"bmi": f"{x[2]}", "pressure": f"{x[3]}", "progress": f"{y}"} for x, y in
                zip(found.data[part], found.target[part])]  # fmt: skip
        (tmp_path / "files").mkdir(exist_ok=True)
        ward_files.write(tmp_path / "files" / f"{name}.csv", rows)
    schema = {
        "target": "progress", "task": "regression", "range": [0, 400, *log], "scale": "signed",
        "numeric": {"bmi": [10, 60], "pressure": [40, 160]},
    }  # fmt: skip
    clients = sd.data.from_folder(tmp_path / "files", schema).with_budgets(8.0, delta=1e-4)
    run = sd.train(clients, "logistic", "dp-fedavg", rounds=30, rate=0.3, lr=0.2)
    new = {"bmi": found.data[:50, 2], "pressure": found.data[:50, 3]}
    told = run.predict(new)
    assert told.classes is None
    assert told.probabilities is None
    scaled = run.model(torch.from_numpy(clients.x[:1])).item()
    unit = (np.clip(scaled, -1, 1) + 1) / 2
    expected = math.expm1(unit * math.log1p(400)) if log else 400 * unit
    first = run.predict({"bmi": found.data[:1, 2], "pressure": found.data[:1, 3]}).prediction
    assert first == pytest.approx([expected], rel=1e-5)
    assert 40 < told.prediction.mean() < 300
    assert float(table(told.csv())[0]["prediction"]) == pytest.approx(told.prediction[0], rel=1e-6)
    missing = run.predict({"bmi": [30.0, None], "pressure": [90.0, 90.0]})
    assert np.isnan(missing.prediction).tolist() == [False, True]


def test_images_are_arrays_of_the_shape_they_were_trained_with(digits, tmp_path):
    run = sd.train(digits, "logistic", **QUICK)
    found = run.predict(digits.x[:5])
    assert found.classes == tuple("0123456789")
    np.savez(tmp_path / "new.npz", x=digits.x[:5])
    np.testing.assert_array_equal(run.predict(tmp_path / "new.npz").prediction, found.prediction)
    np.testing.assert_array_equal(run.predict(torch.from_numpy(digits.x[:5])).prediction, found.prediction)
    spoilt = digits.x[:3].copy()
    spoilt[1, 0, 0, 0] = math.nan
    assert run.predict(spoilt).reasons[1] == "array x: has an entry that is not a finite number"
    with pytest.raises(BadInput, match="it takes"):
        run.predict(digits.x[0])


def test_classes_of_arrays_keep_their_names_and_columns_their_order(tmp_path):
    random = np.random.default_rng(0)
    pairs = [(random.random((40, 2)), random.choice(["no", "yes"], 40)) for _ in range(2)]
    clients = sd.data.from_arrays(pairs, classes=["no", "yes"]).with_budgets(4.0, delta=1e-3)
    run = sd.train(clients, "logistic", **QUICK)
    run.save(tmp_path / "run.safetensors")
    found = sd.load(tmp_path / "run.safetensors").predict(pairs[0][0])
    assert set(found.prediction) <= {"no", "yes"}
    frame = pandas.DataFrame(pairs[0][0], columns=["a", "b"])
    np.testing.assert_array_equal(run.predict(frame).prediction, found.prediction)
    with pytest.raises(BadInput, match="3 columns"):
        run.predict(frame.assign(c=1.0))


def test_clients_own_models_are_asked_by_name(digits, in_folder, tmp_path):
    run = sd.train(digits, "logistic", "mr-mtl", out=tmp_path / "own", **QUICK)
    name = digits.names[1]
    found = run.predict(digits.x[:20], client=name)
    expected = run.model_of(name)(torch.from_numpy(digits.x[:20])).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-6)
    np.savez(tmp_path / "new.npz", x=digits.x[:20])
    code, out, err = in_folder("predict", "own", "new.npz", "--client", name)
    assert (code, err) == (0, "")
    assert [one["prediction"] for one in table(out)] == found.prediction.tolist()
    assert "--client NAME" in in_folder("predict", "own", "new.npz")[2]
    assert in_folder("predict", "own", "new.npz", "--client", "nobody")[0] == 2


def test_a_model_that_protects_nobody_says_so(digits, in_folder, tmp_path):
    sd.train(digits, "logistic", "fedavg", out=tmp_path / "open", **QUICK)
    np.savez(tmp_path / "new.npz", x=digits.x[:2])
    code, out, err = in_folder("-q", "predict", "open", "new.npz")
    assert code == 0
    assert "NOT PRIVATE" in err
    assert "NOT PRIVATE" not in out


def test_a_module_of_ones_own_is_given_back_to_predict(digits, tmp_path):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    run = sd.train(digits, module, **QUICK)
    run.save(tmp_path / "run")
    expected = run.predict(digits.x[:9]).probabilities
    with pytest.raises(BadInput, match="model="):
        sd.load(tmp_path / "run").predict(digits.x[:9])
    fresh = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    np.testing.assert_array_equal(sd.load(tmp_path / "run", model=fresh).predict(digits.x[:9]).probabilities, expected)


def test_runs_of_older_versions_say_what_they_lack(wards, tmp_path):
    folder, run, rows, _ = wards
    columns = {name: [row[name] for row in rows] for name in rows[0]}

    def older(**study) -> sd.Run:
        """The saved run without what an older version did not write."""
        result = json.loads(to_json({key: value for key, value in run.result.items() if key != "records"}))
        result["study"] |= study
        save_file(load_file(folder / "run" / "model.safetensors"), tmp_path / "old", {"sordino": json.dumps(result)})
        return sd.load(tmp_path / "old")

    assert older().result["records"] is None
    np.testing.assert_array_equal(older().predict(columns).prediction, run.predict(columns).prediction)
    deployed = older(data={"name": "wards", "schema": "0" * 64, "sites": ["north"]})
    with pytest.raises(BadInput, match="without its schema"):
        deployed.predict(columns)


def test_the_deployed_model_predicts_as_the_simulated_one(tmp_path):
    rows, _ = ward_files.write_sites(tmp_path / "wards")
    clients = sd.data.from_folder(tmp_path / "wards", ward_files.SCHEMA)
    clients = clients.with_budgets(dict(ward_files.SITES), delta=1e-4)
    study = {
        "study": {"rounds": 2, "seed": 3, "name": "wards"},
        "data": {"schema": ward_files.SCHEMA, "folder": str(tmp_path / "wards")},
        "model": {"name": "mlp"},
        "method": {"name": "dp-fedavg"},
        "training": {"steps": 2, "rate": 0.3, "lr": 0.5},
        "deployment": {"sites": list(clients.names), "enrol": 0.1, "timeout": 5.0},
    }
    alone = simulated(clients, {**study, "budgets": {"epsilon": dict(ward_files.SITES)}}, tmp_path / "simulated")
    with Rig(tmp_path / "sites", clients, study, alone.key, everywhere=Policy()) as rig:
        set_up(tmp_path / "deployed", make_study(study), resume=False)
        serve = tmp_path / "deployed" / "serve.json"
        about = {**json.loads(serve.read_text()), "noises": alone.noises}
        write_atomic(serve, json.dumps(about).encode())
        result = conduct(tmp_path / "deployed", rig.wires)
    assert result["simulated"] is False
    assert result["records"]["classes"] == ward_files.CLASSES
    file = ward_files.write(tmp_path / "new.csv", rows)
    here, there = (sd.load(tmp_path / name).predict(file) for name in ("simulated", "deployed"))
    np.testing.assert_array_equal(here.prediction, there.prediction)
    np.testing.assert_allclose(here.probabilities, there.probabilities, atol=1e-5)


def test_the_page_runs_as_written(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "predict.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S).group(1)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "row,prediction,P(0),P(1),reason" in done.stdout
    assert (tmp_path / "cancer.pt2").exists()
