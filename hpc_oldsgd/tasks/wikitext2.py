"""WikiText-2 with GPT-2: batch 2, alpha 0.01, the gradient's norm clipped at 1."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import Batch
from ..data.shard import Rows
from ..data.text import find_tokenizer, find_wikitext
from ..data.tokens import Tokens, tokens
from ..errors import UserError
from . import models
from .base import OnDisk, Split
from .registry import register


@register("wikitext2-gpt2")
@dataclass(kw_only=True)
class WikiText2GPT2(OnDisk):
    """GPT-2 on WikiText-2, 124.4M parameters or a smaller size; judged by test perplexity."""

    batch: int = 2
    """Sequences per agent and step."""

    clip: float | None = 1.0
    """Limit on the norm of an agent's whole gradient; none if not given."""

    seq: int = 256
    """Tokens per sequence."""

    size: Literal["small", "mini", "tiny"] = "small"
    """small is GPT-2 small (12 layers of 768); mini has 4 of 256, tiny 2 of 128: for a CPU."""

    dropout: float = 0.1
    """Share of activations dropped in training."""

    pretrained: str | None = None
    """Start from these weights: a folder (config.json, model.safetensors) or a hub name."""

    tokenizer: str | None = None
    """Folder with GPT-2's vocabulary files or a hub name; else gpt2-bpe in the data folder."""

    data_name = "WikiText-2"
    primary = ("test_perplexity", "min")
    eval_batch = 4  # 4 x 256 x 50,257 logits are 206 MB

    @property
    def default_alpha(self) -> float:
        """The paper's for GPT-2 small and for weights already trained; small sizes start anew."""
        return 0.01 if self.size == "small" or self.pretrained else 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and less than 1, not {self.dropout:g}")
        if self.seq < 1:
            raise UserError(f"a sequence must have at least 1 token, not {self.seq}")

    def model(self) -> nn.Module:
        vocab = self._tokens("train").vocab
        if self.pretrained is not None:
            return models.pretrained_gpt2(self.pretrained, vocab, self.seq, self.dropout)
        return models.gpt2(self.size, vocab, self.seq, self.dropout)

    def source(self, split: Split) -> Tokens:
        text = find_wikitext(self.root)[split]
        folders = [self.root / "gpt2-bpe", self.root / "gpt2", self.root]
        vocabulary = find_tokenizer(self.tokenizer, *folders)
        return tokens(text, vocabulary, self.seq, data=self.root)

    def fingerprint(self) -> str:
        """The text's and the vocabulary's."""
        return self._tokens("train").key

    def _tokens(self, split: Split) -> Tokens:
        source = self._source(split)
        assert isinstance(source, Tokens)
        return source

    def collate(self, rows: Rows, rng: np.random.Generator | None) -> Batch:
        ids = torch.from_numpy(rows[0].astype(np.int64))
        return ids[:, :-1], ids[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())

    def measure(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        total, count = 0.0, 0
        for x, y in batches:
            total += float(self.loss(model, (x, y))) * y.numel()
            count += y.numel()
        loss = total / count
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
