"""How records are dealt to clients: everybody's share, reproducibly, and as the papers describe it."""

import json
import time

import numpy as np
import pytest

from sordino.data import Dataset, load
from sordino.data.partitions import dirichlet, generator, shards, similarity, split, unequal_sizes
from sordino.errors import BadInput

KINDS = [
    ("iid", {}),
    ("iid", {"sizes": (0.5, 1.5)}),
    ("dirichlet", {"beta": 0.3}),
    ("dirichlet", {"beta": 0.3, "minimum": 40}),
    ("shards", {"shards": 3}),
    ("similarity", {"similarity": 30}),
    ("similarity", {"similarity": 0, "sizes": (0.5, 1.5)}),
]


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def artificial(labels, task="classification"):
    labels = np.asarray(labels)
    x = np.arange(len(labels), dtype=np.float32)[:, None]
    classes = int(labels.max()) + 1 if task == "classification" else None
    return Dataset("artificial", x, labels, task, classes, np.ones(len(labels), dtype=bool))


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_record_goes_to_exactly_one_client_for_training_or_for_testing(digits, kind, options):
    federation = digits.partition(kind, clients=12, seed=3, **options)
    everything = np.concatenate(federation.train + federation.test)
    assert sorted(everything.tolist()) == list(range(1797))
    assert len(federation) == federation.clients == 12
    assert federation.sizes.tolist() == [len(part) for part in federation.train]
    assert all(part.dtype == np.int64 for part in federation.train + federation.test)
    whole = federation.sizes + [len(part) for part in federation.test]
    assert whole.min() >= options.get("minimum", 1)
    for train, test in zip(federation.train, federation.test):
        assert len(test) == int((len(train) + len(test)) * 0.2 + 0.5)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_seed_gives_the_same_deal_again_and_another_seed_another(digits, kind, options):
    one, two, other = (digits.partition(kind, clients=12, seed=seed, **options) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one.train + one.test, two.train + two.test))
    assert not all(np.array_equal(a, b) for a, b in zip(one.train, other.train))


def test_a_federation_shares_the_records_and_says_how_it_was_made(digits):
    federation = digits.partition("dirichlet", clients=12, beta=0.3, seed=7)
    assert federation.x is digits.x
    assert federation.shape == (1, 8, 8)
    assert federation.names[:2] == ["client-00", "client-01"]
    described = json.loads(json.dumps(federation.description))
    assert described["source"]["name"] == "digits"
    assert described["partition"]["beta"] == 0.3
    assert described["partition"]["seed"] == 7
    assert digits.partition("iid", clients=101).names[7] == "client-007"


def test_iid_sizes_differ_by_at_most_one(digits):
    sizes = digits.partition("iid", clients=7, test=0.0).sizes
    assert sizes.max() - sizes.min() <= 1
    assert sizes.sum() == 1797


def test_unequal_sizes_are_proportional_to_uniform_draws():
    sizes = unequal_sizes(60_000, 100, (0.5, 1.5), np.random.default_rng(0))
    draws = np.random.default_rng(0).uniform(0.5, 1.5, 100)
    assert sizes.sum() == 60_000
    assert np.abs(sizes - 60_000 * draws / draws.sum()).max() <= 1


def plain_dirichlet(labels, clients, beta, random):
    """The usual published loop, list by list: a client with its fair share gets none of the later classes."""
    hands = [[] for _ in range(clients)]
    for label in sorted(set(labels.tolist())):
        members = [j for j in range(len(labels)) if labels[j] == label]
        shares = random.dirichlet([beta] * clients)
        shares = [s if len(hand) < len(labels) / clients else 0.0 for s, hand in zip(shares, hands)]
        shares = np.array(shares) / sum(shares)
        ends = (np.cumsum(shares) * len(members)).astype(int)
        ends[-1] = len(members)
        shuffled = random.permutation(members)
        for k, hand in enumerate(hands):
            hand.extend(shuffled[(ends[k - 1] if k else 0) : ends[k]].tolist())
    return hands


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_dirichlet_equals_the_published_loop(beta):
    labels = np.random.default_rng(1).integers(0, 10, 3000)
    parts, moved = dirichlet(labels, 10, beta, 0, np.random.default_rng(5))
    expected = plain_dirichlet(labels, 10, beta, np.random.default_rng(5))
    for part, hand in zip(parts, expected):
        # A cut may fall one record apart where the cumulated share times the class size is a whole number.
        assert len(set(part.tolist()) ^ set(hand)) <= 2
    assert moved == 0


def test_dirichlet_balance_rule_gives_full_clients_no_later_classes(digits):
    federation = digits.partition("dirichlet", clients=12, beta=0.2, test=0.0, seed=2)
    assert federation.description["partition"]["topped_up"] == 0
    seen_full = 0
    for part in federation.train:
        counts = np.bincount(digits.y[part], minlength=10)
        for label in range(1, 10):
            if counts[:label].sum() >= 1797 / 12:
                seen_full += 1
                assert counts[label] == 0
    assert seen_full > 0


def test_dirichlet_concentration_is_governed_by_beta(digits):
    def largest_share(beta):
        federation = digits.partition("dirichlet", clients=10, beta=beta, test=0.0)
        tables = [np.bincount(digits.y[part], minlength=10) for part in federation.train]
        return np.mean([table.max() / table.sum() for table in tables])

    assert largest_share(0.05) > largest_share(0.5) > largest_share(50.0)
    assert largest_share(50.0) < 0.16


def test_dirichlet_reaches_the_minimum_even_where_redrawing_cannot():
    labels = np.random.default_rng(0).integers(0, 10, 6000)
    federation = artificial(labels).partition("dirichlet", clients=500, beta=0.05, minimum=10, test=0.0)
    assert federation.sizes.min() == 10
    assert federation.sizes.sum() == 6000
    assert federation.description["partition"]["topped_up"] > 0


def test_shards_are_equal_runs_of_the_label_sorted_records(digits):
    federation = digits.partition("shards", clients=9, shards=2, test=0.0, seed=1)
    starts = np.searchsorted(np.sort(digits.y), np.arange(10))
    per_shard = 1797 // 18
    for part in federation.train:
        counts = np.bincount(digits.y[part], minlength=10)
        assert abs(len(part) - 2 * per_shard) <= 2
        # Two runs of a hundred touch at most two classes each, for classes are longer than that.
        assert 1 <= (counts > 0).sum() <= 4
    assert np.diff(starts).min() > per_shard


def test_robust_hdp_deal_has_six_equal_shards_and_at_most_six_classes_each():
    """120 label-sorted shards of the 60,000 MNIST-like labels, 6 each: 2400 to train and 600 to test."""
    sizes = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), sizes))
    data = artificial(labels)

    def most(seed, **options):
        federation = data.partition("shards", clients=20, shards=6, seed=seed, **options)
        assert federation.sizes.tolist() == [2400] * 20
        assert [len(part) for part in federation.test] == [600] * 20
        return max(len(set(labels[np.concatenate(pair)])) for pair in zip(federation.train, federation.test))

    assert max(most(seed) for seed in range(8)) > 6
    assert max(most(seed, max_classes=6) for seed in range(8)) == 6
    assert most(0, max_classes=4) == 4


def test_shards_say_when_the_class_limit_is_impossible(digits):
    with pytest.raises(BadInput, match="max_classes"):
        digits.partition("shards", clients=5, shards=1, max_classes=1)


def test_similarity_mixes_the_stated_percentage():
    labels = np.repeat(np.arange(10), 200)
    sizes = np.full(20, 100)
    parts = similarity(labels, sizes, 30.0, np.random.default_rng(0))
    assert [len(part) for part in parts] == [100] * 20
    # The first 30 records of each client are the iid ones, the other 70 come in the order of their labels.
    rest = np.concatenate([labels[part[30:]] for part in parts])
    assert (np.diff(rest) >= 0).all()
    mixed = np.concatenate([labels[part[:30]] for part in parts])
    assert np.bincount(mixed, minlength=10).min() > 30
    assert max(len(set(labels[part[30:]])) for part in parts) <= 3


def test_similarity_zero_is_sorted_and_hundred_is_iid():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
    data = artificial(labels)
    classes = {
        s: [len(set(labels[p])) for p in data.partition("similarity", clients=10, similarity=s, test=0.0).train]
        for s in (0, 100)
    }
    assert classes[0] == [1] * 10
    assert min(classes[100]) == 10


def test_regression_targets_can_be_sorted_but_have_no_classes():
    data = artificial(np.linspace(-1, 1, 200, dtype=np.float32), task="regression")
    spread = [np.ptp(data.y[p]) for p in data.partition("similarity", clients=10, similarity=0, test=0.0).train]
    assert max(spread) < 0.25
    with pytest.raises(BadInput, match="dirichlet partition needs classes"):
        data.partition("dirichlet", clients=10, beta=1.0)


def test_the_split_leaves_a_record_to_train_on():
    train, test = split([np.array([4]), np.array([1, 2, 3])], 0.9, np.random.default_rng(0))
    assert [len(part) for part in train] == [1, 1]
    assert [len(part) for part in test] == [0, 2]


def test_another_split_share_keeps_the_deal(digits):
    whole = digits.partition("dirichlet", clients=12, beta=0.3, test=0.0)
    halved = digits.partition("dirichlet", clients=12, beta=0.3, test=0.5)
    for everything, train, test in zip(whole.train, halved.train, halved.test):
        assert sorted(everything) == sorted(np.concatenate([train, test]))


def test_a_central_test_set_is_held_back_first(digits):
    federation = digits.partition("iid", clients=10, test=0.0, central=0.25, seed=1)
    x, y = federation.central
    assert len(x) == len(y) == round(0.25 * 1797)
    assert federation.sizes.sum() == 1797 - len(x)
    dealt = set(np.concatenate(federation.train).tolist())
    assert all(np.array_equal(digits.x[j], x[k]) for k, j in enumerate(sorted(set(range(1797)) - dealt)))


def test_a_set_with_tests_of_its_own_brings_them_as_the_central_ones():
    data = load("least-squares", records=100, dimension=3, tests=20)
    assert data.partition("iid", clients=2).central[0].shape == (20, 3)
    with pytest.raises(BadInput, match="merge=True"):
        data.partition("iid", clients=2, central=0.1)
    assert (
        load("least-squares", records=100, dimension=3, tests=20, merge=True).partition("iid", clients=2).central
        is None
    )


def test_null_rows_count_as_training_records_and_are_never_tested_on():
    data = artificial(np.arange(100) % 2)
    data.valid[::3] = False
    federation = data.partition("iid", clients=4, test=0.4)
    assert federation.sizes.tolist() == [15] * 4
    assert all(data.valid[part].all() for part in federation.test)
    assert not data.valid[np.concatenate(federation.train)].all()
    held, _ = data.partition("iid", clients=4, central=0.5).central
    assert 0 < len(held) < 50
    assert all(data.valid[int(record[0])] for record in held)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("iid", {"clients": 1798}, "1798 clients are more than the 1797 records"),
        ("iid", {"clients": 0}, "clients is 0"),
        ("iid", {}, "say how many clients"),
        ("iid", {"clients": 12, "beta": 0.3}, "no option 'beta'"),
        ("random", {"clients": 12}, "partition 'random' is unknown"),
        ("dirichlet", {"clients": 12}, "needs a number for beta"),
        ("dirichlet", {"clients": 12, "beta": 0}, "must be > 0"),
        ("dirichlet", {"clients": 12, "beta": 1.0, "minimum": 200}, "need 2400, there are 1797"),
        ("similarity", {"clients": 12, "similarity": 130}, "percentage"),
        ("shards", {"clients": 100, "shards": 100}, "fewer clients or fewer shards"),
        ("shards", {"clients": 10, "shards": 1.5}, "whole number"),
        ("natural", {}, "comes without clients"),
        ("iid", {"clients": 12, "test": 1.0}, "below 1"),
        ("iid", {"clients": 12, "central": -0.1}, "central test set"),
        ("iid", {"clients": 12, "seed": -1}, "seed is -1"),
        ("iid", {"clients": 12, "sizes": (2, 1)}, "0 ≤ a ≤ b"),
        ("iid", {"clients": 1700, "sizes": (0.0, 1.0)}, "would have 0 records"),
    ],
)
def test_impossible_deals_are_refused_with_a_remedy(digits, kind, options, words):
    with pytest.raises(BadInput, match=words):
        digits.partition(kind, **options)


def test_ten_thousand_clients_are_dealt_within_seconds():
    """600,000 records; each of these takes about a second or less, a loop over records would take minutes."""
    labels = np.random.default_rng(0).integers(0, 10, 600_000)
    data = artificial(labels)
    for kind, options in [
        ("iid", {}),
        ("dirichlet", {"beta": 0.3}),
        ("shards", {"shards": 2}),
        ("similarity", {"similarity": 30}),
    ]:
        start = time.perf_counter()
        federation = data.partition(kind, clients=10_000, **options)
        assert time.perf_counter() - start < 15
        assert federation.sizes.sum() + sum(map(len, federation.test)) == 600_000


def test_streams_of_different_purposes_are_unrelated():
    a, b = (generator(0, purpose).standard_normal(1000) for purpose in ("partition", "budgets"))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.1
    assert len(shards(np.arange(10), 2, 2, None, generator(0, "x"))) == 2
