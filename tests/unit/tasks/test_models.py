"""The networks: their sizes, GPT-2's pretrained weights, its dropout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hpc_oldsgd import tasks
from hpc_oldsgd.data import seed_model, seed_step
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.simulation.vmap_gradients import unfit
from hpc_oldsgd.tasks import models
from support.data_files import REAL, needs_cifar10, needs_wikitext2, write_bpe, write_wikitext


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_parameter_counts():
    with torch.device("meta"):  # sizes only: no 500 MB
        counts = {
            "vgg11": count(models.vgg11()),
            "resnet18": count(models.resnet18()),
            "gpt2": count(models.gpt2("small")),
        }
    # 9.23M, 11.17M and 124.4M in the paper
    assert counts == {"vgg11": 9_225_610, "resnet18": 11_173_962, "gpt2": 124_439_808}
    assert count(models.digits_cnn()) == 38_282 and count(models.small_cnn()) == 33_946


@pytest.mark.parametrize(
    "make", [models.small_cnn, models.vgg11, lambda: models.vgg11(True), models.resnet18]
)
def test_vision_models_take_32x32_and_start_alive(make):
    seed_model(1)
    net = make()
    x = torch.randn(4, 3, 32, 32)
    out = net(x)
    assert out.shape == (4, 10) and out.isfinite().all()
    assert out.std(0).min() > 1e-4  # the input reaches the output


def test_the_small_network_can_be_vectorised_over_agents():
    """It keeps no statistics: each agent's gradient depends on its own batch alone."""
    assert unfit(tasks.get("cifar10-small")(), models.small_cnn()) is None
    assert unfit(tasks.get("cifar10-resnet18")(), models.resnet18()) is not None


def test_gpt2_ties_its_output_to_its_embedding():
    net = models.gpt2("tiny", vocab=300)
    assert net.lm_head.weight is net.transformer.wte.weight


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_wikitext(tmp_path)
    write_bpe(tmp_path / "gpt2-bpe")
    return tmp_path


def checkpoint(folder: Path, vocab: int = 300, positions: int = 64) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(11)
    net = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocab, n_positions=positions, n_layer=1, n_head=2, n_embd=32)
    )
    net.save_pretrained(folder)
    return net


def test_pretrained_weights_come_from_a_folder(data):
    models._transformers()
    saved = checkpoint(data / "weights")
    task = tasks.get("wikitext2-gpt2")(
        data_dir=data, seq=16, pretrained=str(data / "weights"), dropout=0.25
    )
    net = task.model()
    assert net.training and net.config.attn_pdrop == net.config.embd_pdrop == 0.25
    assert net.transformer.drop.p == 0.25
    for (name, p), (other, q) in zip(net.named_parameters(), saved.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q)
    got, expected = task.evaluate(net), task.evaluate(saved)
    assert got == expected and got["test_perplexity"] > 1


def test_pretrained_weights_that_do_not_fit_are_refused_in_one_line(data):
    models._transformers()
    checkpoint(data / "small", vocab=299)
    checkpoint(data / "short", positions=8)
    unsafe = checkpoint(data / "pickled")
    (data / "pickled" / "model.safetensors").unlink()
    torch.save(unsafe.state_dict(), data / "pickled" / "pytorch_model.bin")
    (data / "empty").mkdir()
    half = checkpoint(data / "half").state_dict()
    del half["transformer.h.0.mlp.c_fc.weight"], half["lm_head.weight"]
    save_file(half, data / "half" / "model.safetensors", {"format": "pt"})
    checkpoint(data / "torn")
    (data / "torn" / "model.safetensors").write_bytes(b"\x10" + bytes(30))
    checkpoint(data / "odd")
    config = json.loads((data / "odd" / "config.json").read_text())
    (data / "odd" / "config.json").write_text(json.dumps(config | {"n_layer": "two"}))
    expected = {
        "half": "are not all of GPT-2's: transformer.h.0.mlp.c_fc.weight is missing, one of 1",
        "torn": "could not be loaded",
        "odd": "could not be loaded",
        "small": "know 299 tokens, the tokenizer 300",
        "short": "reach 8 positions, less than --seq 16",
        "pickled": "could not be loaded",
        "empty": "config.json is not in it",
    }
    for name, words in expected.items():
        task = tasks.get("wikitext2-gpt2")(data_dir=data, seq=16, pretrained=str(data / name))
        with pytest.raises(UserError) as error:
            task.model()
        assert words in str(error.value) and "\n" not in str(error.value)


def test_unknown_size():
    with pytest.raises(UserError, match="no GPT-2 size 'huge'; known are small, mini, tiny"):
        models.gpt2("huge")


def test_dropout_follows_seed_agent_and_step(data):
    task = tasks.get("wikitext2-gpt2")(data_dir=data, size="tiny", seq=16)
    seed_model(0)
    net, batch = task.model(), task.shard(0, 2).batch(0)

    def loss(i: int, k: int) -> float:
        seed_step(0, i, k)
        return task.loss(net, batch).item()

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(0, 1), loss(1, 0)}) == 3
    quiet = tasks.get("wikitext2-gpt2")(data_dir=data, size="tiny", seq=16, dropout=0.0).model()
    assert task.loss(quiet, batch) == task.loss(quiet, batch)


@needs_cifar10
def test_real_cifar10_trains():
    task = tasks.get("cifar10-vgg11")(data_dir=Path(REAL))
    seed_model(0)
    net, shard = task.model(), task.shard(0, 9)
    before = task.evaluate(net, "train", limit=64)["train_loss"]
    optimizer = torch.optim.SGD(net.parameters(), lr=task.default_alpha)
    for k in range(12):
        optimizer.zero_grad()
        task.loss(net, shard.batch(k)).backward()
        optimizer.step()
    assert task.evaluate(net, "train", limit=64)["train_loss"] < before < 2.31


@needs_wikitext2
def test_real_wikitext2_starts_at_the_uniform_perplexity():
    task = tasks.get("wikitext2-gpt2")(data_dir=Path(REAL), size="tiny", seq=64)
    seed_model(0)
    got = task.evaluate(task.model(), limit=8)
    assert 50257 * 0.9 < got["test_perplexity"] < 50257 * 1.2
    assert task.count() == 2_448_381 // 64
