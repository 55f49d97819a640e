"""The task seam: one suite over all registered tasks, and what is special about each."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpc_oldsgd import tasks
from hpc_oldsgd.data import seed_model, seed_step
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.tasks import Task
from support import ROOT
from support.data_files import write_bpe, write_cifar10, write_wikitext

NAMES = [
    "digits", "logistic", "cifar10-vgg11", "cifar10-resnet18", "wikitext2-gpt2", "cifar10-small",
]  # fmt: skip


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(name, **options): the task over small files of the real format."""
    root: Path = tmp_path_factory.mktemp("data")
    checksums = write_cifar10(root)
    write_wikitext(root)
    write_bpe(root / "gpt2-bpe")

    def make(name: str, **options) -> Task:
        if name.startswith("cifar10"):
            task = tasks.get(name)(data_dir=root, **options)
            task.checksums = checksums
            return task
        if name == "wikitext2-gpt2":
            return tasks.get(name)(**{"data_dir": root, "size": "tiny", "seq": 16} | options)
        return tasks.get(name)(**options)

    return make


def fresh(task: Task, seed: int = 0) -> nn.Module:
    seed_model(seed)
    return task.model()


def test_the_list():
    assert set(NAMES) <= set(tasks.names()) and tasks.names()[0] == "digits"
    assert list(tasks.registry()) == tasks.names()
    assert all(tasks.get(name).name == name and tasks.get(name).__doc__ for name in NAMES)
    batches = {name: tasks.get(name).__dataclass_fields__["batch"].default for name in NAMES}
    assert list(batches.values()) == [8, 32, 8, 8, 2, 8]


def test_the_papers_settings(make):
    for name in NAMES[1:4]:
        assert make(name).default_alpha == 0.01
    gpt2 = tasks.get("wikitext2-gpt2")
    assert gpt2().default_alpha == gpt2(size="tiny", pretrained="gpt2").default_alpha == 0.01
    assert gpt2(size="tiny").default_alpha > 0.01
    assert make("wikitext2-gpt2").clip == 1.0 and make("cifar10-vgg11").clip is None


@pytest.mark.parametrize("name", NAMES)
def test_the_contract(make, name):
    task = make(name)
    model = fresh(task)
    assert all(map(torch.equal, model.state_dict().values(), fresh(task).state_dict().values()))
    assert model.training

    shards = [task.shard(i, 3, "label:0.7", seed=4) for i in range(3)]
    assert sorted(np.concatenate([s.indices for s in shards])) == list(range(task.count()))
    assert len(task.labels()) == task.count() == len(task.train_sample())
    assert len(task.test_set()) == task.count("test")

    batch = shards[1].batch(2)
    assert all(len(part) == task.batch for part in batch)
    seed_step(4, 1, 2)
    loss = task.loss(model, batch)
    assert loss.shape == () and math.isfinite(loss.item())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    again = make(name)  # another rank, or the simulator
    other = fresh(again)
    seed_step(4, 1, 2)
    other_loss = again.loss(other, again.shard(1, 3, "label:0.7", seed=4).batch(2))
    other_loss.backward()
    assert torch.equal(loss, other_loss)
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )

    metric, better = task.primary
    numbers = task.evaluate(model, limit=6)
    assert metric in numbers and better in ("max", "min")
    assert all(isinstance(value, float) for value in numbers.values())


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_disturbs_nothing(make, name):
    task = make(name)
    model = fresh(task)
    next(iter(model.children())).eval()  # a part the user froze stays frozen
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    first, second = (task.evaluate(model, "train", limit=5) for _ in range(2))
    assert first == second and "train_loss" in first
    assert torch.equal(generator, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_evaluate_counts_every_sample_once(make):
    """Against one pass over everything, in double precision."""
    task = make("digits", batch=3)
    model = fresh(task)
    x, y = (torch.from_numpy(a) for a in task.source("test").rows(np.arange(task.count("test"))))
    logits = model.double()(x.double())
    expected = F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double().mean().item()
    got = task.evaluate(model.float())
    assert got["test_accuracy"] == expected[1]
    assert math.isclose(got["test_loss"], expected[0], rel_tol=1e-5)
    held = task.evaluate(model, task.test_set())
    assert held == {"loss": got["test_loss"], "accuracy": got["test_accuracy"]}


def test_perplexity_is_exp_of_the_mean_over_all_targets(make):
    task = make("wikitext2-gpt2")
    model = fresh(task).eval()
    rows = torch.from_numpy(task.test_set().rows[0].astype(np.int64))
    with torch.no_grad():
        log_p = torch.log_softmax(model(rows[:, :-1]).logits.double(), -1)
    loss = -log_p.gather(2, rows[:, 1:, None]).mean().item()
    got = task.evaluate(model)
    assert math.isclose(got["test_loss"], loss, rel_tol=1e-5)
    assert math.isclose(got["test_perplexity"], math.exp(loss), rel_tol=1e-4)


def test_samples_are_the_same_in_every_process_and_nested_in_the_training_set(make):
    task = make("digits")
    sample = task.train_sample(100)
    assert len(sample) == 100 and task.train_sample(100) is sample
    assert np.array_equal(sample.rows[0], make("digits").train_sample(100).rows[0])
    everything = {row.tobytes() for row in task.train_sample().rows[0]}
    assert {row.tobytes() for row in sample.rows[0]} <= everything
    assert len(task.train_sample(10**6)) == task.count() == 1438
    assert len(task.test_set()) == 359
    held_out = {row.tobytes() for row in task.test_set().rows[0]}
    assert not held_out & everything  # no image on both sides
    table = np.bincount(task.test_set().rows[1])
    assert table.max() - table.min() <= 2  # every label


def test_digits_are_those_of_scikit_learn(make):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    ours = make("digits").train_sample(), make("digits").test_set()
    x, y = (np.concatenate([part.rows[k] for part in ours]) for k in (0, 1))
    theirs = (images.reshape(-1, 1, 8, 8) / 8 - 1).astype(np.float32)
    assert sorted(zip(map(bytes, x), y, strict=True)) == sorted(
        zip(map(bytes, theirs), labels, strict=True)
    )


@pytest.mark.parametrize("batchnorm", [False, True])
def test_digits_learns(make, batchnorm):
    task = make("digits", batchnorm=batchnorm)
    model, shard = fresh(task), task.shard(0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.default_alpha)
    for k in range(250):
        optimizer.zero_grad()
        task.loss(model, shard.batch(k)).backward()
        optimizer.step()
    assert task.evaluate(model)["test_accuracy"] > 0.9


def test_augmentation_changes_training_batches_and_nothing_else(make):
    plain, other = (make("cifar10-vgg11", augment=a) for a in (False, True))
    shards = [task.shard(0, 2) for task in (plain, other)]
    first, second = (shard.batch(0) for shard in shards)
    assert not torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert torch.equal(second[0], make("cifar10-vgg11", augment=True).shard(0, 2).batch(0)[0])
    epoch = len(shards[1]) // 8
    assert not torch.equal(second[0], shards[1].batch(epoch)[0])
    for task in (plain, other):
        x, _ = next(task.test_set().batches(4))
        assert torch.equal(x, next(plain.test_set().batches(4))[0])


def test_a_task_of_ones_own(tmp_path, monkeypatch):
    """The page's own example, installed as a package that names it in an entry point."""
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (entry,) = re.findall(r"```toml\n.*?\n(.*?) = \"(.*?)\"\n```", page, re.DOTALL)
    (tmp_path / "my_task.py").write_text(code)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hpc_oldsgd.tasks]\n{} = {}\n".format(*entry))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tasks.registry.__self__, "_known", dict(tasks.registry()))
    monkeypatch.setattr(tasks.registry.__self__, "_plugins_loaded", False)
    assert "tumours" in tasks.names()
    task = tasks.get("tumours")(width=8)
    model, shard = fresh(task), task.shard(0, 2, "dirichlet:0.5")
    optimizer = torch.optim.SGD(model.parameters(), lr=task.default_alpha)
    for k in range(task.default_iterations):
        optimizer.zero_grad()
        task.loss(model, shard.batch(k)).backward()
        optimizer.step()
    assert task.evaluate(model)["test_accuracy"] > 0.9
    with pytest.raises(UserError, match="'tumours' is registered already"):
        tasks.register("tumours")(tasks.Digits)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tasks.get("cifar10-vg11"), "did you mean cifar10-vgg11"),
        (lambda: tasks.get("zzz"), "known are digits, logistic"),
        (lambda: tasks.get("digits")(batch=0), "at least 1 sample"),
        (lambda: tasks.get("digits")(clip=0.0), "must be positive"),
        (lambda: tasks.get("digits")().train_sample(0), "at least 1 element"),
        (lambda: tasks.get("wikitext2-gpt2")(dropout=1.0), "dropout must be"),
        (lambda: tasks.get("wikitext2-gpt2")(seq=0), "at least 1 token"),
    ],
)
def test_errors_say_what_to_do(call, words):
    with pytest.raises(UserError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
