"""The order of batches, augmentation and dropout: pure functions of (seed, agent, step)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from hpc_oldsgd import tasks
from hpc_oldsgd.data import Arrays, Shard, seed_model, seed_step
from hpc_oldsgd.data.seeding import Use, generator
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.tasks.cifar10 import PAD, crop_and_mirror


def shard(m: int, batch: int, i: int = 0, seed: int = 0) -> Shard:
    rows = (np.arange(m) * 10, np.arange(m) % 3)
    return Shard(i, np.arange(m), rows, batch, seed, lambda r, _: tuple(map(torch.from_numpy, r)))


@pytest.mark.parametrize(("m", "batch"), [(12, 4), (7, 3), (2, 5), (1, 1), (1, 4), (5, 5)])
def test_the_stream_is_one_permutation_of_the_shard_after_another(m, batch):
    epochs = 4
    own = shard(m, batch, i=3, seed=9)
    drawn = np.concatenate([own.batch(k)[0] for k in range(-(-epochs * m // batch))]) // 10
    for epoch in range(epochs):
        here = drawn[epoch * m : (epoch + 1) * m]
        assert sorted(here) == list(range(m))
        assert (here == generator(Use.ORDER, 9, 3, epoch).permutation(m)).all()
    assert all(len(own.batch(k)[0]) == batch for k in range(5))


def test_batch_k_depends_on_k_alone():
    forward, fresh = shard(7, 3), shard(7, 3)
    batches = [forward.batch(k) for k in range(20)]
    for k in np.random.default_rng(0).permutation(20):
        assert all(map(torch.equal, batches[k], fresh.batch(int(k))))
        assert all(map(torch.equal, batches[k], shard(7, 3).batch(int(k))))


def test_orders_of_past_epochs_are_let_go():
    m, own = 50_000, shard(50_000, 50_000)
    tracemalloc.start()
    try:
        for k in range(20):
            own.picks(k)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 5 * m * 8  # of twenty


def test_agents_seeds_and_epochs_draw_differently():
    first = shard(50, 50).batch(0)[0].tolist()
    others = [shard(50, 50, i=1), shard(50, 50, seed=1)]
    assert all(other.batch(0)[0].tolist() != first for other in others)
    assert shard(50, 50).batch(1)[0].tolist() != first


def test_the_order_stays_what_it_is():
    """A change here changes every run and breaks every resume."""
    assert shard(8, 8, i=2, seed=7).picks(3).tolist() == [1, 7, 0, 4, 6, 2, 5, 3]


def test_rows_and_labels_stay_together():
    x, y = shard(30, 11).batch(4)
    assert torch.equal(x // 10 % 3, y)


def test_a_shard_holds_a_copy_of_its_own_rows_only():
    task = tasks.get("digits")()
    shards = [task.shard(i, 9, "label") for i in range(9)]
    whole = task.source("train").rows(np.arange(task.count()))
    assert sum(s.nbytes for s in shards) == sum(a.nbytes for a in whole)
    for own in shards:
        assert all(a.base is None for a in own.rows)  # no view that would keep the whole alive
        for held, all_of_it in zip(own.rows, whole, strict=True):
            assert np.array_equal(held, all_of_it[own.indices])


def test_the_data_is_read_once_for_all_agents(monkeypatch):
    task = tasks.get("digits")()
    alone = [task.shard(i, 9, "label:0.7", 3) for i in (8, 2, 5)]
    asked = []
    source = task._source("train")
    rows = source.rows
    monkeypatch.setattr(type(source), "rows", lambda self, i: asked.append(len(i)) or rows(i))
    for own, one in zip(task.shards([8, 2, 5], 9, "label:0.7", 3), alone, strict=True):
        assert own.i == one.i and np.array_equal(own.indices, one.indices)
        assert all(map(np.array_equal, own.rows, one.rows))
        assert all(map(torch.equal, own.batch(7), one.batch(7)))
    assert asked == [sum(map(len, alone))]


def test_crop_and_mirror_is_the_usual_augmentation():
    images = np.random.default_rng(2).integers(0, 256, (40, 3, 32, 32), dtype=np.uint8)
    result = crop_and_mirror(images, np.random.default_rng(5))
    assert result.flags.c_contiguous and result.dtype == np.uint8
    rng = np.random.default_rng(5)
    tops, lefts = rng.integers(0, 2 * PAD + 1, size=(2, 40))
    mirrored = rng.random(40) < 0.5
    for image, got, top, left, mirror in zip(images, result, tops, lefts, mirrored, strict=True):
        canvas = np.zeros((3, 40, 40), dtype=np.uint8)
        canvas[:, 4:36, 4:36] = image
        expected = canvas[:, top : top + 32, left : left + 32]
        assert np.array_equal(got, expected[:, :, ::-1] if mirror else expected)
    assert 5 < mirrored.sum() < 35 and len(set(tops)) == len(set(lefts)) == 9


def dropout_of(seed: int, i: int, k: int) -> list[bool]:
    seed_step(seed, i, k)
    return torch.nn.functional.dropout(torch.ones(64), 0.5).bool().tolist()


def test_dropout_is_seeded_by_seed_agent_and_step():
    keys = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (0, 0, 0), (2**32, 1, 2), (0, 1, 2 + 2**32)]
    masks = [dropout_of(*key) for key in keys]
    assert masks == [dropout_of(*key) for key in keys]
    assert len({tuple(mask) for mask in masks}) == len(keys)


def test_models_start_alike_for_one_seed():
    def weights(seed: int, agent: int = 0) -> torch.Tensor:
        seed_model(seed, agent)
        return torch.nn.Linear(4, 4).weight

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))
    assert not torch.equal(weights(3), weights(3, agent=1))


def test_bad_arguments():
    with pytest.raises(UserError, match="counted from 0"):
        shard(4, 2).batch(-1)
    with pytest.raises(UserError, match="0 or more, not -1"):
        seed_step(-1, 0, 0)
    with pytest.raises(UserError, match="no agent 9 among 9"):
        tasks.get("digits")().shard(9, 9)


def test_arrays_give_the_rows_asked_for():
    source = Arrays((np.eye(3), np.array([2, 0, 1], dtype=np.int32)))
    x, y = source.rows(np.array([2, 0]))
    assert x.tolist() == [[0, 0, 1], [1, 0, 0]] and y.tolist() == [1, 2]
    assert source.labels.dtype == np.int64
