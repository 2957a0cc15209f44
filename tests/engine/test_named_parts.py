"""``module:attribute`` wherever a method or a part is named: values, factories, mistakes, and what a site allows."""

import json
import sys
from pathlib import Path

import pytest
import torch
from federation_rig import Rig, five_clients, table

import sordino as sd
from sordino.engine.federation import wire
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.errors import BadInput
from sordino.methods import get
from sordino.methods.identity import identity
from sordino.study.file import make_study

OWN = '''
from pathlib import Path

Path(__file__).with_name("mark").write_text("imported")

import torch
import sordino as sd
from sordino import parts


@parts.part
def soft(sharpness: float = 1.0) -> parts.Clip:
    """Every record counts 1/(1 + sharpness·norm)."""
    return parts.Clip("soft", lambda l, n, p: 1.0 / (1.0 + sharpness * n), lambda p: p["clip"])


def plain_soft(sharpness=1.0, *, more=0):
    return soft(sharpness)


def needs_one(strength):
    return soft(strength)


def wrong():
    return 7


def mean(updates, facts, memory):
    return parts.Outcome(updates.mean(0), None, memory)


ready = soft(2.0)
rule = parts.Aggregate("mean", mean)
step = parts.server.ema(decay=0.5)
asked = parts.ask.loss(share=0.2)
number = 7
text = "dp-fedavg"
method = sd.Method("own", clip=ready, aggregate=rule)


def make_method():
    return sd.Method("made", clip=soft(3.0))


def make_nothing():
    return None
'''


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A folder on the path with a module that leaves a mark when it is imported; forgotten afterwards."""
    (tmp_path / "ownparts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ownparts", raising=False)
    yield tmp_path
    sys.modules.pop("ownparts", None)


def imported(folder: Path) -> bool:
    return (folder / "mark").exists()


def losses():
    return torch.rand(4), torch.rand(4), {"clip": 1.0}


def test_methods_are_values_or_factories(own):
    found = get("ownparts:method")
    assert (found.name, found.clip.name, found.aggregate.name) == ("own", "soft(sharpness=2.0)", "mean")
    assert get("ownparts:make_method").clip.name == "soft(sharpness=3.0)"
    assert get("ownparts:method", {"clip": "flat", "aggregate": "uniform"}).describe()["aggregate"] == "uniform"


def test_parts_are_values_or_factories_with_options(own):
    found = get("dp-fedavg", {"clip": "ownparts:ready", "aggregate": "ownparts:rule", "server": "ownparts:step"})
    assert found.describe() | {"clip": "soft(sharpness=2.0)", "aggregate": "mean"} == found.describe()
    assert found.server is sys.modules["ownparts"].step
    assert get("dp-q-ffl", {"ask": {"name": "ownparts:asked"}}).ask == (sys.modules["ownparts"].asked,)
    for name in ("soft", "plain_soft"):
        chosen = get("dp-fedavg", {"clip": {"name": f"ownparts:{name}", "sharpness": 4.0}}).clip
        _, norms, public = given = losses()
        torch.testing.assert_close(chosen.factors(*given), 1.0 / (1.0 + 4.0 * norms))
        assert chosen.bound(public) == 1.0
        assert get("dp-fedavg", {"clip": f"ownparts:{name}"}).clip.name.startswith("soft")
    made = [get("dp-fedavg", {"clip": {"name": "ownparts:soft", "sharpness": s}}).clip for s in (1.0, 2.0, 2.0)]
    assert identity(made[0]) != identity(made[1]) == identity(made[2])


def test_a_study_names_them_and_a_run_uses_them(own, digits):
    study = make_study({"method": {"name": "ownparts:method", "clip": {"name": "ownparts:soft", "sharpness": 9.0}}})
    assert study.chosen_method().describe()["clip"] == "soft(sharpness=9.0)"
    run = sd.train(digits, "logistic", study.chosen_method(), rounds=1, rate=0.2)
    assert torch.isfinite(run.weights).all()


WRONG = [
    ("an option it has not", {"clip": {"name": "ownparts:soft", "sharpnes": 1.0}}, "no option 'sharpnes'.*'sharpness'"),
    (
        "an option of nobody",
        {"clip": {"name": "ownparts:plain_soft", "xyz": 1}},
        "no option 'xyz': use sharpness, more",
    ),
    ("options of a value", {"clip": {"name": "ownparts:ready", "sharpness": 1.0}}, "ready value"),
    ("an option that is missing", {"clip": "ownparts:needs_one"}, "strength"),
    ("a number", {"clip": "ownparts:number"}, "is a int, not a Clip"),
    ("another kind of part", {"clip": "ownparts:step"}, "ServerStep, not a Clip"),
    ("an aggregation rule as a clip", {"clip": "ownparts:rule"}, "clip"),
    ("a clip as an aggregation rule", {"aggregate": "ownparts:ready"}, "not a Aggregate"),
    ("a factory of something else", {"clip": "ownparts:wrong"}, "clip is 7, and not a Clip"),
    ("a factory of another kind", {"aggregate": "ownparts:soft"}, "not a Aggregate"),
    ("an attribute that is not there", {"clip": "ownparts:sofd"}, "nothing called 'sofd'"),
    ("no attribute", {"clip": "ownparts:"}, "is not a name"),
    ("a module that is not there", {"clip": "no_such_module:soft"}, "cannot import 'no_such_module'.*PYTHONPATH"),
    ("no module", {"clip": ":soft"}, "clip"),
    ("a relative module", {"clip": ".ownparts:soft"}, "clip"),
    ("a part that does not exist", {"clippy": "ownparts:soft"}, "clippy"),
]


@pytest.mark.parametrize(("overrides", "message"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_mistakes_in_parts_are_named(own, overrides, message):
    with pytest.raises(BadInput, match=message):
        get("dp-fedavg", overrides)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ownparts:number", "has to be a sordino.Method"),
        ("ownparts:text", "has to be a sordino.Method"),
        ("ownparts:ready", "has to be a sordino.Method"),
        ("ownparts:make_nothing", "has to be a sordino.Method"),
        ("ownparts:needs_one", "ownparts:needs_one"),
        ("ownparts:nothing", "nothing called 'nothing'"),
        ("no_such_module:method", "cannot import 'no_such_module'"),
        (":method", "method"),
    ],
)
def test_mistakes_in_methods_are_named(own, name, message):
    with pytest.raises(BadInput, match=message):
        get(name)


# What a site allows

ELSEWHERE = [
    ("ownparts:method", {}),
    ("dp-fedavg", {"clip": "ownparts:ready"}),
    ("dp-fedavg", {"clip": {"name": "ownparts:soft", "sharpness": 1.0}}),
    ("dp-fedavg", {"aggregate": "ownparts:rule"}),
    ("dp-fedavg", {"server": "ownparts:step"}),
    ("dp-q-ffl", {"ask": "ownparts:asked"}),
    ("dp-fedavg", {"local": "ownparts:ready"}),
    ("dp-fedavg", {"select": "ownparts:ready"}),
]


@pytest.mark.parametrize("modules", [(), ("other",), ("ownparts.more",), ("ownpart",), ("ownparts:method",)], ids=str)
@pytest.mark.parametrize(("name", "overrides"), ELSEWHERE, ids=str)
def test_a_module_that_is_not_allowed_is_not_imported(own, name, overrides, modules):
    with pytest.raises(BadInput, match="not allowed here"):
        get(name, overrides, modules)
    assert not imported(own)


@pytest.mark.parametrize(("name", "overrides"), ELSEWHERE[:6], ids=str)
def test_one_that_is_allowed_is(own, name, overrides):
    get(name, overrides, ("ownparts",))
    assert imported(own)


def test_a_name_inside_an_option_imports_nothing(own):
    for name in ("scaffold", "feddyn"):
        with pytest.raises(BadInput, match="unknown"):
            get("dp-fedavg", {"local": name, "aggregate": {"name": name, "combine": "ownparts:rule"}}, ())
    with pytest.raises(BadInput, match="unknown"):
        get("dp-fedavg", {"calibrate": "ownparts:rule"}, ())
    assert not imported(own)


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    clients = five_clients((4.0, 8.0))
    with Rig(tmp_path_factory.mktemp("rig"), clients, table("dp-fedavg", clients, steps=1, rate=0.2)) as laid:
        yield laid


def hello(rig, policy: Policy, method: dict) -> Packet:
    """What a site says to a study that a server describes like this."""
    site = rig.wires.sites[rig.clients.names[0]]
    before, site.policy = site.policy, policy
    try:
        brief = {**json.loads(json.dumps(rig.ready.brief)), "method": method}
        return unpack(site.handle(pack(Packet(wire.HELLO, {"brief": brief}))))
    finally:
        site.policy = before
        site._understood.cache_clear()


@pytest.mark.parametrize(("name", "overrides"), ELSEWHERE, ids=str)
@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(modules=("other",)), Policy(methods=("ownparts:method", "dp-fedavg", "dp-q-ffl"))],
    ids=["as it comes", "another module", "allowed by name only"],
)
def test_a_site_refuses_before_anything_is_imported(own, rig, policy, name, overrides):
    reply = hello(rig, policy, {"name": name, **overrides})
    assert reply.kind == wire.REFUSED
    assert "not allowed here" in reply.facts["reason"]
    assert not imported(own)
    assert "ownparts" not in sys.modules


def test_a_site_whose_officer_allows_the_module_takes_part(own, rig):
    reply = hello(rig, Policy(modules=("ownparts",)), {"name": "ownparts:method"})
    assert reply.kind == wire.FACTS, reply.facts
    assert imported(own)
    reply = hello(rig, Policy(modules=("ownparts",), methods=("dp-fedavg",)), {"name": "ownparts:method"})
    assert reply.kind == wire.REFUSED
    for clip in ("ownparts:ready", {"name": "ownparts:soft", "sharpness": 2.0}):
        allowed = Policy(modules=("ownparts",), methods=("dp-fedavg",))
        reply = hello(rig, allowed, {"name": "dp-fedavg", "clip": clip})
        assert reply.kind == wire.REFUSED
        assert "exchanges its clip" in reply.facts["reason"]


@pytest.mark.parametrize("part", ["clip", "local", "aggregate", "server", "ask", "select"])
def test_a_server_cannot_call_what_an_allowed_module_merely_imported(own, rig, part):
    """An officer allows a module for its parts, not for whatever functions it has imported: here ``os.mkdir``."""
    (own / "ownparts.py").write_text(OWN.replace("import torch\n", "from os import mkdir\nimport torch\n"))
    made = own / "made by the server"
    reply = hello(
        rig, Policy(modules=("ownparts",)), {"name": "dp-fedavg", part: {"name": "ownparts:mkdir", "path": str(made)}}
    )
    assert imported(own)
    assert not made.exists()
    assert reply.kind == wire.REFUSED


def test_a_server_cannot_call_what_an_allowed_module_merely_imported_as_a_method(own, rig):
    text = "from sys import exit\nimport torch\n"
    (own / "ownparts.py").write_text(OWN.replace("import torch\n", text))
    reply = hello(rig, Policy(modules=("ownparts",)), {"name": "ownparts:exit"})
    assert reply.kind == wire.REFUSED
