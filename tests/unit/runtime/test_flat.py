"""A module in one buffer: nothing it does may tell the difference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.flat import ALIGN_BYTES, Flat
from support.small_problems import OPTIMIZERS, backward, cnn


def test_values_stay_and_become_views():
    model = cnn()
    before = copy.deepcopy(model.state_dict())
    flat = Flat(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    flat.x.fill_(3.0)
    for slot in flat.slots:
        assert bool((slot.tensor == 3).all())
        assert slot.offset * flat.x.element_size() % ALIGN_BYTES == 0
    assert torch.equal(model[8].weight, before["8.weight"])  # frozen: not inside


def test_layout_covers_every_trained_parameter_once_and_float_buffers():
    flat = Flat(cnn())
    names = [s.name for s in flat.slots]
    assert names[:3] == ["0.weight", "0.bias", "1.weight"]
    assert "5.weight" in names and "7.weight" not in names  # one Parameter used twice
    assert not any(name.startswith("8.") for name in names)
    assert names[-2:] == ["1.running_mean", "1.running_var"]
    assert [s.name for s in Flat(cnn(), "local").slots] == names[:-2]
    ends = [s.offset + s.tensor.numel() for s in flat.slots]
    assert all(end <= s.offset for end, s in zip(ends, flat.slots[1:], strict=False))
    assert ends[-1] <= flat.d


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_in_the_buffer_is_training(name):
    plain, inside = cnn(), cnn()
    Flat(inside)
    optimizers = [
        OPTIMIZERS[name]([p for p in m.parameters() if p.requires_grad]) for m in (plain, inside)
    ]
    for k in range(5):
        for model, optimizer in zip((plain, inside), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, 0, k)
            optimizer.step()
    for (key, a), b in zip(plain.state_dict().items(), inside.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_gradient_is_laid_out_like_x():
    model = cnn()
    flat = Flat(model)
    backward(model, 0, 0)
    grads = {s.name: s.tensor.grad.clone() for s in flat.parameters}
    g = flat.gradient()
    for slot in flat.parameters:
        assert torch.equal(slot.view(g), grads[slot.name])
    assert g.numel() == flat.d
    inside = torch.zeros(flat.d, dtype=torch.bool)
    for slot in flat.parameters:
        inside[slot.offset : slot.offset + slot.tensor.numel()] = True
    assert not g[~inside].any()  # nothing for buffers and gaps
    g.mul_(2)
    assert torch.equal(model[0].weight.grad, 2 * grads["0.weight"])
    model.zero_grad(set_to_none=False)
    backward(model, 0, 0)
    assert flat.gradient() is g and torch.equal(model[0].weight.grad, grads["0.weight"])
    model.zero_grad()
    assert not flat.gradient().any()


def test_channels_last_keeps_its_layout():
    model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    flat = Flat(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, before)
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    assert torch.equal(flat.slots[0].view(flat.gradient()), model.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_float_type(dtype):
    model = nn.Linear(3, 2).to(dtype)
    flat = Flat(model)
    assert flat.x.dtype == dtype
    assert flat.slots[1].offset * dtype.itemsize == ALIGN_BYTES


def test_a_module_that_moves_away_is_noticed():
    model = cnn()
    flat = Flat(model)
    flat.check_views()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, 0, 0)
    optimizer.step()
    model.load_state_dict(cnn(seed=5).state_dict())
    flat.check_views()  # in place is fine
    model[4].weight.data = model[4].weight.data.clone()
    with pytest.raises(UserError, match=r"4\.weight was moved out"):
        flat.check_views()


def test_version_sees_every_change_in_place():
    model = cnn()
    flat = Flat(model)
    seen = [flat.version()]
    with torch.no_grad():
        flat.x.add_(1)
        seen.append(flat.version())
        model[4].weight.mul_(2)
        seen.append(flat.version())
    model.load_state_dict(cnn(seed=5).state_dict())
    seen.append(flat.version())
    assert len(set(seen)) == 4


def test_signature_tells_models_apart():
    assert Flat(cnn()).signature() == Flat(cnn(seed=9)).signature()
    others = [cnn() for _ in range(5)]
    others[0][4] = nn.Linear(180, 8)
    others[1][8] = nn.Linear(7, 8).requires_grad_(False)
    others[2][8].requires_grad_(True)
    others[3].to(torch.float64)
    others[4][10].requires_grad_(False)  # the last one: all names stay in their order
    signatures = {Flat(m).signature() for m in (cnn(), *others)}
    signatures.add(Flat(cnn(), "local").signature())
    assert len(signatures) == 7
    conv = nn.Conv2d(2, 2, 3)
    plain = Flat(conv).signature()
    assert Flat(conv.to(memory_format=torch.channels_last)).signature() != plain


def test_what_cannot_be_flat_is_refused():
    with pytest.raises(UserError, match="no parameters that require a gradient"):
        Flat(nn.Linear(2, 2).requires_grad_(False))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(UserError, match=r"1\.weight is torch.float64 on cpu, 0\.weight is"):
        Flat(mixed)
    model = nn.Linear(2, 2)
    model.register_buffer("steps", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(UserError, match=r'buffers="local"'):
        Flat(model)
    Flat(model, "local")
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(1, 2).expand(2, 2))
    with pytest.raises(UserError, match="expanded or overlapping"):
        Flat(model)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(UserError, match="tie them as one Parameter"):
        Flat(model)
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)  # frozen, not mixed
    with pytest.raises(UserError, match="tie them as one Parameter"):
        Flat(model)
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    with pytest.raises(UserError, match=r'mask holds NaN or infinity .*buffers="local"'):
        Flat(model)
    Flat(model, "local")
    with pytest.raises(UserError, match=r'"mix" or "local", not'):
        Flat(nn.Linear(2, 2), "mixed")  # type: ignore[arg-type]


def test_a_sparse_gradient_is_refused_where_it_would_be_read():
    model = nn.Embedding(5, 3, sparse=True)
    flat = Flat(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="weight has a sparse gradient"):
        flat.gradient()
