"""Partitions: every sample once, no agent empty, the promised balance, the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_oldsgd.data import Dirichlet, Iid, Label, parse
from hpc_oldsgd.data.histogram import counts, skew
from hpc_oldsgd.errors import UserError

PARTITIONS = [Iid(), Label(0.0), Label(0.3), Label(), Label(1.0), Dirichlet(0.01), Dirichlet(5.0)]

labels_of = st.lists(st.integers(0, 6), min_size=1, max_size=80)


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@settings(max_examples=40)
@given(labels=labels_of, share=st.floats(0, 1), seed=st.integers(0, 2**40))
def test_every_sample_goes_to_exactly_one_agent(partition, labels, share, seed):
    n = 1 + int(share * (len(labels) - 1))
    parts = partition.split(labels, n, seed)
    assert len(parts) == n and all(len(part) for part in parts)
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() for part in parts)
    again = partition.split(np.array(labels), n, seed)
    assert all(map(np.array_equal, parts, again))


@settings(max_examples=40)
@given(labels=labels_of, share=st.floats(0, 1), seed=st.integers(0, 99))
def test_iid_balances_sizes_and_every_label_up_to_one(labels, share, seed):
    n = 1 + int(share * (len(labels) - 1))
    table = counts(np.array(labels), Iid().split(labels, n, seed))
    assert np.ptp(table.sum(1)) <= 1
    assert (np.ptp(table, axis=0) <= 1).all()


@settings(max_examples=40)
@given(labels=labels_of, share=st.floats(0, 1), s=st.floats(0, 1), seed=st.integers(0, 99))
def test_label_keeps_sizes_equal_up_to_one(labels, share, s, seed):
    n = 1 + int(share * (len(labels) - 1))
    sizes = [len(part) for part in Label(s).split(labels, n, seed)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("s", [0.0, 0.25, 0.7, 1.0])
def test_label_gives_share_s_of_an_agents_data_by_label(s):
    """As many agents as labels: agent i has s of its data from label i, the rest from all alike."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(8), 100))
    table = counts(labels, Label(s).split(labels, 8, seed=3))
    expected = (1 - s) * 100 / 8 + s * 100 * np.eye(8)
    assert np.abs(table - expected).max() <= 2


def test_label_slices_are_next_to_each_other():
    labels = np.repeat(np.arange(10), 90)
    table = counts(labels, Label(1.0).split(labels, 9))
    for i, row in enumerate(table):
        assert set(np.flatnonzero(row)) == {i, i + 1}
        assert row[i] == 90 - 10 * i and row[i + 1] == 10 * (i + 1)


def test_dirichlet_goes_from_one_agent_per_label_to_iid():
    labels = np.repeat(np.arange(10), 200)
    tables = [counts(labels, Dirichlet(a).split(labels, 5)) for a in (1e-9, 0.1, 1.0, 1e4)]
    skews = [float(skew(t).mean()) for t in tables]
    assert skews == sorted(skews, reverse=True)
    assert skews[-1] < 0.05 and skews[1] > 0.3
    assert np.abs(tables[-1] - 40).max() <= 8
    biggest = tables[0].max(0)
    assert (biggest >= 200 - 5).all()  # whole labels, but for the samples that feed the empty


def test_dirichlet_shares_have_the_variance_of_the_distribution():
    """Var of one share of Dirichlet(a, ..., a) over n is (n - 1) / (n^2 (n a + 1))."""
    labels, a, n = np.repeat(np.arange(400), 500), 0.5, 4
    shares = counts(labels, Dirichlet(a).split(labels, n)) / 500
    expected = (n - 1) / (n**2 * (n * a + 1))
    assert np.isclose(shares.var(), expected, rtol=0.1)
    assert np.isclose(shares.mean(), 1 / n)


@pytest.mark.parametrize("partition", [Iid(), Label(), Dirichlet()], ids=str)
def test_another_seed_is_another_partition(partition):
    labels = np.arange(1000) % 10
    first, second = (np.concatenate(partition.split(labels, 9, seed)) for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_partitions_stay_what_they_are():
    """A change here changes every run and breaks every resume."""
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    iid, label, dirichlet = (
        [part.tolist() for part in partition.split(labels, 3, seed=5)]
        for partition in (Iid(), Label(), Dirichlet())
    )
    assert iid == [[2, 3, 7, 8], [1, 5, 6, 11], [0, 4, 9, 10]]
    assert label == [[0, 1, 5, 7], [2, 4, 6, 9], [3, 8, 10, 11]]
    assert dirichlet == [[1, 3, 5], [0, 2, 8, 9, 10, 11], [4, 6, 7]]


def test_names():
    assert parse("iid") == Iid()
    assert parse("label") == Label(0.7)
    assert parse("label:0.25") == Label(0.25)
    assert parse("dirichlet:0.1") == Dirichlet(0.1)
    assert parse(Label(0.5)) == Label(0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: parse("labels"), "did you mean label"),
        (lambda: parse("xyz"), "known are iid, label, dirichlet"),
        (lambda: parse("label:many"), "label:NUMBER"),
        (lambda: parse("iid:0.5"), "takes no number"),
        (lambda: parse("label:1.1"), "between 0 and 1"),
        (lambda: parse("label:nan"), "between 0 and 1"),
        (lambda: parse("dirichlet:0"), "must be positive"),
        (lambda: parse("dirichlet:inf"), "must be positive"),
        (lambda: Iid().split([0, 1, 2], 4), "4 agents cannot share 3 training samples"),
        (lambda: Iid().split([0, 1, 2], 0), "at least 1 agent"),
        (lambda: Iid().split([0, 1, 2], 2, seed=-1), "0 or more"),
    ],
)
def test_errors_say_what_to_do(make, words):
    with pytest.raises(UserError, match=words) as error:
        make()
    assert "\n" not in str(error.value)
