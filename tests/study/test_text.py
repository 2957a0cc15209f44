"""Texts from raw files to predictions: by commands, in Python, at real sites, in programs without sordino."""

from __future__ import annotations

import csv
import io
import json
import runpy
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from federation_rig import Rig, records_of, simulated

import sordino as sd
from sordino.data.tokens import Tokenizer
from sordino.engine.federation.limits import Policy
from sordino.errors import BadInput
from sordino.study.conduct import conduct, set_up
from sordino.study.deploy import declared_records, schema_hash
from sordino.study.deploy import prepare as served
from sordino.study.file import make_study
from sordino.study.site_file import read_site

EXAMPLE = Path(__file__).parents[2] / "examples" / "text"
SMALL = {"vocabulary": 256, "length": 40}
SCHEMA = {
    "target": "department",
    "classes": ["cardiology", "gastroenterology", "neurology", "pneumology", "surgery"],
    "text": {"note": SMALL},
}
QUICK = {"rounds": 3, "rate": 0.3, "lr": 3.0}


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """A tenth of the example's notes, without a fill: a note that nobody wrote is a null row."""
    folder = tmp_path_factory.mktemp("text")
    runpy.run_path(str(EXAMPLE / "make_notes.py"))["write"](folder / "notes", 0.1)
    return folder


@pytest.fixture(scope="module")
def clients(notes):
    return sd.data.from_folder(notes / "notes", SCHEMA, invalid="null").with_budgets(8.0, delta=1e-4)


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_from_raw_files_to_predictions_by_commands_alone(in_folder, tmp_path):
    runpy.run_path(str(EXAMPLE / "make_notes.py"))["write"](tmp_path / "notes", 0.1)
    code, draft, _ = in_folder("data", "schema", "notes")
    assert code == 0
    schema = tomllib.loads(draft)["data"]["schema"]
    assert set(schema["text"]) == {"note"}
    assert (schema["target"], set(schema["numeric"]), schema["fill"]) == ("department", {"age"}, {"note": ""})
    study = draft + '\n[study]\nname = "text"\n[data]\nname = "notes"\n[budgets]\nepsilon = 8\ndelta = 1e-4\n'
    Path("study.toml").write_text(study)
    code, out, _ = in_folder("plan", "study.toml")
    assert code == 0
    assert "Embedding: per-record" in out, "the fast engine serves it"
    assert in_folder("-q", "run", "study.toml", "--set", "study.rounds=150")[0] == 0
    lines = ["id,age,note", '7,61,"crushing chest pain, palpitations"', "8,30,", f"9,25,{'open wound ' * 900}"]
    Path("new.csv").write_text("\n".join(lines) + "\n")
    code, out, err = in_folder("predict", "runs/text", "new.csv", "--id", "id")
    assert (code, err) == (0, "")
    found = table(out)
    assert [one["prediction"] for one in found if one["id"] != "8"] == ["cardiology", "surgery"]
    result = json.loads(Path("runs/text/result.json").read_text())
    assert result["final"]["accuracy"] > result["baselines"]["majority"]["accuracy"] + 0.1
    assert (result["study"]["model"]["name"], result["study"]["model"]["tokens"]) == ("text-bag", 4096 + 16)
    assert in_folder("card", "runs/text", "--out", "card.md")[0] == 0
    assert in_folder("report", "runs/text")[0] == 0
    assert in_folder("export", "runs/text", "text.pt2")[0] == 0
    x = sd.data.unlabelled.read_unlabelled("new.csv", sd.data.schema.parse_schema(schema), ()).x
    there = torch.export.load("text.pt2").module()(torch.from_numpy(x)).detach().numpy()
    wanted = [[float(one[f"P({name})"]) for name in SCHEMA["classes"]] for one in found]
    np.testing.assert_allclose(there, wanted, atol=1e-5)


def test_adapters_of_an_encoder_from_raw_texts_to_predictions_by_commands(in_folder, notes):
    study = f"""
[study]
name = "adapters"
rounds = 2
[data]
name = "{notes / "notes"}"
invalid = "null"
[data.schema]
target = "department"
classes = {SCHEMA["classes"]}
text = {{note = {{vocabulary = 256, length = 40}}}}
[budgets]
epsilon = 8
delta = 1e-4
[model]
name = "text-encoder"
options = {{width = 8, heads = 2}}
lora = {{rank = 2, train = ["head"]}}
[training]
rate = 0.3
lr = 0.5
"""
    Path("study.toml").write_text(study)
    code, _, err = in_folder("-q", "run", "study.toml")
    assert code == 0, err
    code, out, err = in_folder("predict", "runs/adapters", str(notes / "new-notes.csv"))
    assert (code, err) == (0, "2 of 20 records have no prediction: the last column says why\n"), "those without a text"
    run, told = sd.load("runs/adapters"), json.loads(Path("runs/adapters/result.json").read_text())["study"]["model"]
    trained = {name: one.numel() for name, one in run.template.named_parameters() if one.requires_grad}
    assert {name.split(".")[-2] for name in trained} == {"down", "up", "head"}
    assert told["parameters"] == len(run.weights) == sum(trained.values())
    assert (told["tokens"], len(told["frozen"])) == (256, 64)
    wanted = run.predict(notes / "new-notes.csv")
    assert [one["prediction"] for one in table(out)] == [one or "" for one in wanted.prediction]
    x = Tokenizer("words", 256, 40).encode(["crushing chest pain", "", "deep cut to the hand " * 30])
    one = sd.models.merged(run.model)
    torch.testing.assert_close(one(torch.from_numpy(x)), run.model(torch.from_numpy(x)))
    plain = sd.models.build("text-encoder", (40,), 5, tokens=256, width=8, heads=2)
    assert torch.equal(one.tokens.weight, plain.tokens.weight), "the table of tokens is frozen"
    assert list(one.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("model", ["text-bag", "text-encoder"])
def test_exported_programs_give_what_predict_gives(clients, tmp_path, model):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs pip install 'sordino[onnx]'")
    run = sd.train(clients, model, **QUICK)
    texts = ["crushing chest pain", "...", "deep cut to the hand " * 30]
    wanted = run.predict(texts).probabilities
    x = Tokenizer("words", 256, 40).encode(texts)
    run.export(tmp_path / "text.pt2")
    run.export(tmp_path / "text.onnx", format="onnx")
    there = torch.export.load(tmp_path / "text.pt2").module()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(there, wanted, atol=1e-5)
    session = onnxruntime.InferenceSession(tmp_path / "text.onnx")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, atol=1e-5)
    told = json.loads(session.get_modelmeta().custom_metadata_map["sordino"])
    assert told["records"]["schema"]["text"] == {"note": SMALL}
    assert (told["features"][0], told["features"][-1]) == ("note[1]", "note[40]")


DEPLOYED = {
    "text-bag": {"name": "text-bag"},
    "text-encoder": {"name": "text-encoder", "options": {"width": 8, "heads": 2}},
    "adapters": {
        "name": "text-encoder",
        "options": {"width": 8, "heads": 2},
        "lora": {"rank": 2, "targets": ["query", "value"], "train": ["head"]},
    },
}


@pytest.mark.parametrize("model", DEPLOYED.values(), ids=DEPLOYED)
def test_a_deployed_model_predicts_as_its_simulation(notes, tmp_path, model):
    epsilon = {"east": 4.0, "north": 8.0, "south": 2.0, "west": 8.0}
    clients = sd.data.from_folder(notes / "notes", SCHEMA, test=0.8, invalid="null").with_budgets(epsilon, delta=1e-4)
    assert not clients.valid.all(), "there are null rows"
    study = {
        "study": {"rounds": 2, "seed": 3, "name": "text"},
        "data": {"schema": SCHEMA, "folder": str(notes / "notes"), "invalid": "null"},
        "model": model,
        "method": {"name": "dp-fedavg"},
        "training": {"steps": 2, "rate": 0.3, "lr": 0.5},
        "deployment": {"sites": list(clients.names), "enrol": 0.1, "timeout": 20.0},
    }
    alone = simulated(clients, {**study, "budgets": {"epsilon": epsilon}}, tmp_path / "simulated")
    with Rig(tmp_path / "sites", clients, study, alone.key, everywhere=Policy()) as rig:
        set_up(tmp_path / "deployed", make_study(study), resume=False)
        serve = tmp_path / "deployed" / "serve.json"
        serve.write_text(json.dumps({**json.loads(serve.read_text()), "noises": alone.noises}))
        result = conduct(tmp_path / "deployed", rig.wires)
        sizes = {len(request) for _, request, _ in rig.wires.heard}
    assert result["simulated"] is False
    assert sizes
    here, there = (sd.load(tmp_path / name).predict(notes / "new-notes.csv") for name in ("simulated", "deployed"))
    np.testing.assert_array_equal(here.prediction, there.prediction)
    there_p, here_p = there.probabilities, here.probabilities
    np.testing.assert_allclose(here_p, there_p, atol=1e-5)


def test_null_rows_contribute_nothing_at_a_site(clients):
    records = records_of(clients, 0)
    assert records.x.dtype == torch.int64
    assert records.valid is not None
    assert not records.x[~records.valid].any()


SITE = """\
[site]
name = "north"
server = "127.0.0.1:9092"
[data]
path = "north.csv"
[data.schema]
target = "to"
classes = ["a", "b"]
[data.schema.text]
note = {words = "words.txt", length = 4}
[budget]
epsilon = 2.0
delta = 1e-5
"""


def test_a_site_reads_texts_as_the_study_declares_them(tmp_path):
    (tmp_path / "words.txt").write_text("pain\nchest\n")
    lines = [b"note,to", b"chest pain,a", b",b", b"caf\xe9,a", b"x,c", b'"open,b', b"pain " * 900 + b",b"]
    (tmp_path / "north.csv").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "SITE.toml").write_text(SITE)
    records, declared = read_site(tmp_path / "SITE.toml").records()
    assert records.x.tolist() == [[3, 2, 0, 0], *[[0] * 4] * 4, [2] * 4]
    assert records.valid.tolist() == [True, False, False, False, False, True]
    assert (declared.records, declared.shape, declared.tokens) == (6, (4,), 4)
    schema = {"target": "to", "classes": ["a", "b"], "text": {"note": {"words": ["pain", "chest"], "length": 4}}}
    study = make_study({"data": {"schema": schema}, "deployment": {"sites": ["north"]}})
    shape, classes, hashed = declared_records(study)
    assert (shape, classes, hashed) == (declared.shape, declared.classes, declared.schema)
    brief = served(study, "run1").brief
    assert brief["model"] == {"name": "text-bag", "options": {}}
    assert brief["tokens"] == 4


def test_a_site_refuses_a_study_that_reads_its_texts_otherwise(clients, tmp_path):
    other = {**SCHEMA, "text": {"note": {"vocabulary": 512, "length": 40}}}
    study = {
        "study": {"rounds": 2, "seed": 3, "name": "text"},
        "data": {"schema": other},
        "deployment": {"sites": list(clients.names)},
    }
    with Rig(tmp_path, clients, study, everywhere=Policy()) as rig:
        rig.coordinator_facts()
        assert "ids of 512 tokens, this site's are ids of 256 tokens" in rig.turned_away["east"]
    assert schema_hash(sd.data.schema.parse_schema(other)) != schema_hash(sd.data.schema.parse_schema(SCHEMA))


def test_what_a_model_sends_does_not_tell_how_long_texts_are(tmp_path):
    """Short texts and endless ones: the same shapes, the same sizes of everything that is sent."""
    sizes = {}
    for kind, text in (("short", "pain"), ("long", "pain of every kind and place, " * 200)):
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("one", "two"):
            (folder / f"{name}.csv").write_text("note,to\n" + "\n".join(f'"{text}",{"ab"[k % 2]}' for k in range(30)))
        schema = {"target": "to", "classes": ["a", "b"], "text": {"note": {"vocabulary": 64, "length": 8}}}
        clients = sd.data.from_folder(folder, schema, test=0.0).with_budgets({"one": 8.0, "two": 8.0}, delta=1e-4)
        assert clients.x.shape == (60, 8)
        study = {
            "study": {"rounds": 2, "seed": 3, "name": "text"},
            "data": {"schema": schema},
            "method": {"name": "dp-fedavg"},
            "training": {"rate": 0.3, "lr": 0.5},
            "deployment": {"sites": ["one", "two"]},
        }
        with Rig(tmp_path / f"{kind} sites", clients, study, everywhere=Policy()) as rig:
            rig.train()
            sizes[kind] = [(name, len(request), len(reply)) for name, request, reply in rig.wires.heard]
    assert sizes["short"] == sizes["long"]


def test_a_classifier_of_frames_and_of_persons(notes):
    rows = pandas.concat([pandas.read_csv(one).assign(site=one.stem) for one in sorted((notes / "notes").glob("*"))])
    rows = rows[rows["note"].notna()].reset_index(drop=True)
    rows["patient"] = [f"p{k // 2}" for k in range(len(rows))]
    schema = {**SCHEMA, "unit": "patient", "unit_records": 2}
    schema.pop("target")
    model = sd.Classifier(16.0, 1e-4, schema=schema, training={"rounds": 100, "lr": 30.0, "rate": 0.5})
    model.fit(rows, rows["department"], clients=rows["site"])
    assert model.score(rows, rows["department"]) > 0.4
    assert model.run_.result["study"]["model"]["name"] == "text-bag"
    with pytest.raises(BadInput, match="row 1 has no prediction: column 'note': is missing"):
        model.predict(pandas.DataFrame({"note": ["pain", None], "patient": ["a", "b"]}))


def test_own_ids_own_network_and_a_saved_run(tmp_path):
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 200)
    x = np.where(random.random((200, 6)) < 0.6, 2 + y[:, None], random.integers(0, 12, (200, 6)))
    clients = sd.data.from_arrays([(x[:100], y[:100]), (x[100:], y[100:])], classes=2, tokens=12).with_budgets(
        8.0, 1e-3
    )
    run = sd.train(clients, rounds=60)
    assert run.result["final"]["accuracy"] > 0.8
    run.save(tmp_path / "ids.safetensors")
    again = sd.load(tmp_path / "ids.safetensors").predict(x[:5])
    np.testing.assert_array_equal(again.prediction, run.predict(x[:5]).prediction)
    own = torch.nn.Sequential(torch.nn.Embedding(12, 3), torch.nn.Flatten(), torch.nn.Linear(18, 2))
    assert sd.train(clients, own, **QUICK).result["study"]["model"]["tokens"] == 12
    with pytest.raises(BadInput, match="takes numbers, and these records are texts"):
        sd.plan(clients, "logistic")
    with pytest.raises(BadInput, match="reads text, and these records are numbers"):
        sd.plan(sd.data.load("breast-cancer").partition("iid", clients=2).with_budgets(1.0), "text-bag")
