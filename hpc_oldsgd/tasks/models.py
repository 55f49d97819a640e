"""The tasks' networks. Each is initialised from torch's generator as it stands."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..data import torchvision_shim
from ..errors import UserError, unknown

Size = Literal["small", "mini", "tiny"]
GPT2_SIZES: dict[str, dict[str, int]] = {
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "mini": {"n_layer": 4, "n_head": 4, "n_embd": 256},
    "tiny": {"n_layer": 2, "n_head": 2, "n_embd": 128},
}
GPT2_VOCAB = 50257
GPT2_POSITIONS = 1024


def digits_cnn(batchnorm: bool = False) -> nn.Module:
    """Two convolutions and two linear layers for 8x8 images: 38,282 parameters."""

    def conv(inside: int, outside: int) -> list[nn.Module]:
        layer = nn.Conv2d(inside, outside, 3, padding=1, bias=not batchnorm)
        norm: list[nn.Module] = [nn.BatchNorm2d(outside)] if batchnorm else []
        return [layer, *norm, nn.ReLU()]

    return nn.Sequential(
        *conv(1, 16),
        *conv(16, 32),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def small_cnn() -> nn.Module:
    """Three convolutions with GroupNorm and one linear layer for 32x32: 33,946 parameters.

    Strides of 2 in place of pooling: a third of the time on a CPU, as accurate in five epochs.
    GroupNorm keeps no statistics, so the gradients of all agents can be computed together.
    """

    def conv(inside: int, outside: int) -> list[nn.Module]:
        layer = nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False)
        return [layer, nn.GroupNorm(4, outside), nn.ReLU()]

    layers = [*conv(3, 16), *conv(16, 32), *conv(32, 64)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def vgg11(batchnorm: bool = False) -> nn.Module:
    """torchvision's VGG11 for 32x32: its five poolings leave 1x1, so one linear layer follows.

    Only the convolutions are built: the classifier of VGG() would take 0.5 GB to throw away.
    """
    vgg = torchvision_shim.load("VGG11").models.vgg
    features = vgg.make_layers(vgg.cfgs["A"], batch_norm=batchnorm)
    for layer in features:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(features, nn.Flatten(), nn.Linear(512, 10))


def resnet18() -> nn.Module:
    """torchvision's ResNet18 for 32x32: a 3x3 first convolution of stride 1, no first pooling."""
    net = torchvision_shim.load("ResNet18").models.resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return net


def gpt2(
    size: Size = "small", vocab: int = GPT2_VOCAB, seq: int = 256, dropout: float = 0.1
) -> nn.Module:
    """transformers' GPT-2, the output layer tied to the embedding."""
    if size not in GPT2_SIZES:
        raise unknown("GPT-2 size", size, GPT2_SIZES)
    transformers = _transformers()
    positions = max(GPT2_POSITIONS, seq)
    config = transformers.GPT2Config(
        vocab_size=vocab, n_positions=positions, **GPT2_SIZES[size], **_dropout(dropout)
    )
    return transformers.GPT2LMHeadModel(config)


def pretrained_gpt2(name: str, vocab: int, seq: int, dropout: float) -> nn.Module:
    """GPT-2 weights from a folder or the hub; safetensors only, so nothing is unpickled."""
    transformers = _transformers()
    folder = Path(name).expanduser()
    local = folder.is_dir()
    if local and not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no GPT-2 weights: config.json is not in it")
    try:
        net, told = transformers.GPT2LMHeadModel.from_pretrained(
            folder if local else name,
            use_safetensors=True,
            output_loading_info=True,
            **_dropout(dropout),
        )
    except Exception as error:  # files from elsewhere fail in many ways
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"GPT-2 weights could not be loaded from {name}: {reason}") from error
    # The output layer is the embedding; anything else that is missing was drawn at random.
    missing = sorted(set(told["missing_keys"]) - {"lm_head.weight"})
    if missing:
        raise UserError(
            f"the weights in {name} are not all of GPT-2's: {missing[0]} is missing, one of "
            f"{len(missing)}"
        )
    if net.config.vocab_size < vocab:
        raise UserError(
            f"the weights in {name} know {net.config.vocab_size} tokens, the tokenizer {vocab}: "
            "pass the --tokenizer that belongs to them"
        )
    if net.config.n_positions < seq:
        raise UserError(
            f"the weights in {name} reach {net.config.n_positions} positions, less than --seq {seq}"
        )
    return net.train()


def _dropout(p: float) -> dict[str, float]:
    return {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}


def _transformers() -> Any:
    if find_spec("transformers") is None:
        raise UserError("GPT-2 needs transformers: pip install transformers")
    torchvision_shim.prepare()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers
