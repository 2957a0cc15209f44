"""Attention, recurrent layers, shared weights and adapters, against a float64 loop over records."""

import copy

import pytest
import torch
from gradient_reference import assert_graded_like_plain, plain_gradients, relative
from sequence_models import CASES, CLASSES, LENGTH, WIDTH, WORDS, Read, adapted, attention, classes_of, read, tokens
from test_copies import COPIES, assert_like_plain
from torch import nn

from sordino.client import gradients
from sordino.client.gradients import Alone
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.losses import loss_by_name
from sordino.errors import BadInput
from sordino.models import isolated
from sordino.models.recurrent import Recurrent

LOSS = loss_by_name("cross-entropy")


def labels(model, *lead):
    return torch.randint(0, classes_of(model), lead, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_layer_like_a_loop_over_records(name, stack):
    model = CASES[name]()
    x = tokens(3, 4)
    assert_graded_like_plain(Fast(model, LOSS, stack=stack), model, x, labels(model, 3, 4), tolerance=2e-5)
    wide = copy.deepcopy(model).double()
    assert_graded_like_plain(Fast(wide, LOSS, stack=stack), wide, x, labels(model, 3, 4), tolerance=1e-10)


@pytest.mark.parametrize("name", ["encoder", "lstm, two layers, both ways", "tied", "two tables in one", "adapters"])
@pytest.mark.parametrize("stack", [False, True])
def test_units_of_several_inputs(name, stack):
    model = CASES[name]().double()
    engine = Fast(model, LOSS, stack=stack, copies=COPIES)
    assert_like_plain(engine, model, tokens(2, 3, COPIES), labels(model, 2, 3), 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_the_fast_engine_is_taken_and_agrees_with_the_exact_one(name):
    model = CASES[name]()
    engine = gradients.build(model, "cross-entropy")
    x, y = tokens(2, 4), labels(model, 2, 4)
    params = engine.flatten(model).expand(2, -1)
    graded, exact = engine(params, x, y), gradients.build(model, "cross-entropy", "exact")(params, x, y)
    assert all(plan.method != "exact" for plan in engine.describe()), engine.describe()
    assert relative(graded.norms, exact.norms.double()) < 1e-5
    factors = torch.rand(2, 4)
    assert relative(graded.pull(factors), exact.pull(factors).double()) < 1e-5
    torch.testing.assert_close(engine.predict(params[0], x[0]), _outputs(model, x[0]), rtol=1e-4, atol=1e-5)


def _outputs(model, x):
    with torch.enable_grad():  # or torch takes its shortcut, which gives NaN where nothing may be attended to
        return copy.deepcopy(model).eval()(x).detach()


@pytest.mark.parametrize("length", [130, 7])
def test_long_sequences_too(length):
    model = Read(attention(), lambda m, x, p: m(x, x, x, key_padding_mask=p, need_weights=False)[0]).double()
    x = torch.randint(0, WORDS, (2, 2, length), generator=torch.Generator().manual_seed(0))
    assert_graded_like_plain(Fast(model, LOSS), model, x, labels(model, 2, 2), tolerance=1e-10)


@pytest.mark.parametrize("wide", [3, 90])
def test_gradients_of_many_positions_are_held_or_not(wide):
    """3×8 weights at five positions: dyᵀx is held; 90×90: x and dy are."""
    model = nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Flatten(), nn.Linear(5 * wide, 3))
    model = model.double()
    x, y = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randint(0, 3, (2, 3))
    for stack in (False, True):
        assert_graded_like_plain(Fast(model, LOSS, stack=stack), model, x, y, tolerance=1e-10)


class TestPadding:
    @pytest.mark.parametrize("name", ["encoder", "attention, padding, no bias", "encoder layer, norm first, gelu"])
    def test_padded_places_contribute_nothing(self, name):
        """A record's loss and gradient are those of its words alone, however much padding follows them."""
        model = read(name).double()
        short = torch.tensor([[3, 4]])
        long = torch.tensor([[3, 4, 0, 0, 0]])
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        engine, y = Fast(model, LOSS), torch.tensor([1])
        wanted = plain_gradients(model, flat, short, y)
        graded = engine(flat[None], long[None], y[None])
        assert relative(graded.losses[0], wanted[0]) < 1e-12
        assert relative(graded.pull(torch.ones(1, 1, dtype=torch.float64)), wanted[1]) < 1e-10

    def test_a_record_of_padding_alone_has_a_finite_gradient_and_none_for_words(self):
        model = read("encoder")
        engine = Fast(model, LOSS)
        x, y = torch.zeros(1, 2, LENGTH, dtype=torch.long), torch.tensor([[0, 1]])
        graded = engine(engine.flatten(model)[None], x, y)
        assert bool(graded.norms.isfinite().all())
        pulled = graded.pull(torch.ones(1, 2))
        assert bool(pulled.isfinite().all())
        table = next(slot for slot in engine.layout if slot.name == "table.weight")
        assert not table.part(pulled).any()

    def test_shapes_do_not_depend_on_lengths(self):
        """What is computed and held has one size, whatever the records' lengths."""
        model = read("encoder")
        sizes = set()
        for x in (torch.zeros(4, LENGTH, dtype=torch.long), torch.ones(4, LENGTH, dtype=torch.long), tokens(4)):
            engine = Fast(model, LOSS)
            engine(engine.flatten(model)[None], x[None], torch.zeros(1, 4, dtype=torch.long))
            sizes.add((engine.bytes_per_record, engine._volume))
        assert len(sizes) == 1


class TestChoice:
    @pytest.mark.parametrize(
        ("inner", "reason"),
        [
            (nn.MultiheadAttention(WIDTH, 2), "batch_first=True"),
            (nn.LSTM(WIDTH, WIDTH), "batch_first=True"),
            (nn.LSTM(WIDTH, WIDTH, batch_first=True, proj_size=4), "proj_size"),
            (nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True), "add_bias_kv"),
            (
                nn.TransformerEncoderLayer(WIDTH, 2, 8, activation=lambda x: x - x.mean(0), batch_first=True),
                "activation that is not known",
            ),
        ],
    )
    def test_what_is_not_known_goes_one_record_at_a_time_with_a_reason(self, inner, reason):
        engine = gradients.build(Read(inner, lambda m, x, p: x), "cross-entropy")
        (plan,) = engine.describe()
        assert plan.method == "exact"
        assert reason in plan.reason

    def test_attention_over_the_wrong_axis_is_graded_one_record_at_a_time(self):
        """Without batch_first the first axis is the sequence: given records there, they would see each other."""
        model = Read(
            nn.MultiheadAttention(WIDTH, 2),
            lambda m, x, p: m(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(0, 1),
        )
        engine = gradients.build(model, "cross-entropy")
        assert_graded_like_plain(engine, model, tokens(2, 3), labels(model, 2, 3), tolerance=1e-5)

    def test_a_method_put_on_one_module_is_seen(self):
        model = read("encoder layer")
        model.inner._sa_block = lambda *given: given[0] - given[0].mean(0)
        (plan,) = gradients.build(model, "cross-entropy").describe()
        assert "code of its own" in plan.reason

    def test_shared_weights_without_a_rule_go_to_the_exact_engine(self):
        model = nn.Sequential(nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3), nn.Flatten(), nn.Linear(8, 3))
        model[1].weight = model[0].weight
        engine = gradients.build(model, "cross-entropy")
        assert "share a weight" in engine.describe()[0].reason
        assert_graded_like_plain(engine, model, torch.randn(2, 3, 2, 8), torch.randint(0, 3, (2, 3)))

    def test_a_chain_with_one_module_twice(self):
        shared = nn.Linear(4, 4)
        model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 3)).double()
        engine = Fast(model, LOSS)
        assert engine.dimension == 20 + 15
        x = torch.randn(2, 3, 4, dtype=torch.float64)
        assert_graded_like_plain(engine, model, x, torch.randint(0, 3, (2, 3)), tolerance=1e-10)

    def test_packed_sequences_are_refused_for_their_lengths_show(self):
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, WIDTH), torch.tensor([3, 2]), batch_first=True)
        with pytest.raises(BadInput, match="all of one length"):
            Recurrent(nn.LSTM(WIDTH, WIDTH, batch_first=True))(packed)


def test_dropout_in_attention_is_the_same_for_norms_and_sums():
    torch.manual_seed(0)
    model = Read(nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.5, batch_first=True), lambda m, x, p: m(x))
    engine = Fast(model, LOSS)
    x, y = tokens(1, 6), torch.zeros(1, 6, dtype=torch.long)
    graded = engine(engine.flatten(model)[None], x, y)
    for record in range(6):
        alone = (torch.arange(6) == record).float()[None]
        torch.testing.assert_close(graded.pull(alone).norm(), graded.norms[0, record])


def test_a_site_trains_shared_weights_and_adapters_too():
    for name in ("tied", "adapters"):
        model = CASES[name]()
        x, y = tokens(4), labels(model, 4)
        alone = Alone(model, LOSS)
        found = alone.under(alone.flatten(model))(x, y)
        wanted = plain_gradients(model, alone.flatten(model), x, y)[1]
        assert not found.troubles
        assert relative(found.gradients, wanted) < 1e-5


def test_only_adapters_are_in_the_rows():
    model = adapted()
    engine = Fast(model, LOSS)
    assert {slot.name.rpartition(".")[0].rpartition(".")[2] for slot in engine.layout} == {"down", "up"}
    frozen = [module for module in engine.module.modules() if isinstance(module, nn.Linear) and module.out_features > 2]
    assert any(bool(module.weight.isfinite().all()) for module in frozen), "the frozen part keeps its weights"


def test_a_missed_use_of_a_shared_weight_would_be_seen():
    """The comparison with plain autograd must be able to fail: a table read past its layer."""

    @isolated
    class Past(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return self.out((self.table(x) + self.table.weight.sum(0)).mean(1))

    engine = gradients.build(Past(), "cross-entropy")
    engine(engine.flatten(engine._model)[None], tokens(1, 3), torch.zeros(1, 3, dtype=torch.long))
    assert engine.describe()[0].method == "exact"
