"""Small files in the formats of the real data sets, made from a seed."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

REAL = os.environ.get("HPC_OLDSGD_DATA", "")
needs_cifar10 = pytest.mark.skipif(
    not (Path(REAL) / "cifar-10-batches-py").is_dir() or not REAL,
    reason="HPC_OLDSGD_DATA holds no CIFAR-10",
)
needs_wikitext2 = pytest.mark.skipif(
    not (Path(REAL) / "wikitext-2").is_dir() or not REAL,
    reason="HPC_OLDSGD_DATA holds no WikiText-2",
)

TEXT = "the tower of salt , which was built in 1904 by @-@ unk river cold <unk> café — né"
WORDS = TEXT.split()


def write_cifar10(root: Path, per_file: int = 40, seed: int = 0) -> dict[str, dict[str, str]]:
    """CIFAR-10's python batches with random images; returns {"train": {file: md5}, ...}."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    names = {"train": [f"data_batch_{k}" for k in range(1, 6)], "test": ["test_batch"]}
    checksums: dict[str, dict[str, str]] = {}
    for split, files in names.items():
        checksums[split] = {}
        for name in files:
            content = {
                "batch_label": name,
                "labels": rng.permutation(np.arange(per_file) % 10).tolist(),
                "data": rng.integers(0, 256, (per_file, 3072), dtype=np.uint8),
                "filenames": [f"{k}.png" for k in range(per_file)],
            }
            checksums[split][name] = _pickle(folder / name, content)
    meta = {"label_names": [f"label {k}" for k in range(10)]}
    checksums["meta"] = {"batches.meta": _pickle(folder / "batches.meta", meta)}
    return checksums


def wikitext(articles: int, seed: int = 0) -> str:
    """Text in WikiText's form: titles, sections, and a line that only looks like a title."""
    rng = np.random.default_rng(seed)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS, count))

    text = " \n"
    for k in range(articles):
        text += f" = Article {k} = \n \n"
        for section in range(2):
            text += f" {words(30)} . \n \n = = Section {section} = = \n \n {words(20)} . \n"
        text += f" = {words(2)} ; not a title = \n {words(10)} \n \n"
    return text


def write_wikitext(root: Path, layout: str = "wikitext-2/{}.txt", articles: int = 12) -> None:
    for k, split in enumerate(("train", "valid", "test")):
        path = root / layout.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wikitext(max(2, articles // (1 + 3 * (k > 0))), seed=k).encode())


def write_bpe(folder: Path, names: tuple[str, str] = ("encoder.json", "vocab.bpe")) -> None:
    """A byte-pair vocabulary of GPT-2's kind with 300 tokens, learnt from the words above."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" " + " ".join(WORDS)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))
    (folder / "vocab.json").rename(folder / names[0])
    (folder / "merges.txt").rename(folder / names[1])


def _pickle(path: Path, content: object) -> str:
    data = pickle.dumps(content, protocol=2)
    path.write_bytes(data)
    return hashlib.md5(data).hexdigest()
