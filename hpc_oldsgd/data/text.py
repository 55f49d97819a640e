"""WikiText-2 and GPT-2's tokenizer: which files they are, and text -> token ids per article."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .partition import Ints

FOLDERS = ("wikitext-2", "wikitext-2-raw", "wikitext-2-raw-v1", "wikitext-2-v1", ".")
LAYOUTS = ("{}.txt", "wiki.{}.raw", "wiki.{}.tokens")
VOCABULARIES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"), ("tokenizer.json",))

# " = Title = " with an empty line on both sides; sections have " = = Title = = ".
TITLE = re.compile(r"(?:^|(?<=\n)) ?\n( ?= [^=\n]+ = ?\n) ?\n")


def find_wikitext(data: Path) -> dict[str, Path]:
    """The train and test files (and valid where there is one) of the first layout found."""
    for folder in FOLDERS:
        for layout in LAYOUTS:
            files = {s: data / folder / layout.format(s) for s in ("train", "valid", "test")}
            if files["train"].is_file() and files["test"].is_file():
                return {split: path for split, path in files.items() if path.is_file()}
    raise UserError(
        f"WikiText-2 is not in {data}: looked for wikitext-2/train.txt and test.txt, or "
        "wikitext-2-raw/wiki.train.raw and wiki.test.raw (or .tokens); unpack it there, "
        "e.g. from https://huggingface.co/datasets/Salesforce/wikitext"
    )


def find_tokenizer(given: str | None, *folders: Path) -> tuple[Path, ...]:
    """The vocabulary files: in the folder or under the hub name given, else in `folders`."""
    places = list(folders) if given is None else [Path(given).expanduser()]
    for place in places:
        for names in VOCABULARIES:
            files = tuple(place / name for name in names)
            if all(file.is_file() for file in files):
                return files
    if given is not None and not places[0].exists():
        return (_from_hub(given),)
    looked = ", ".join(str(place) for place in places)
    raise UserError(
        f"GPT-2's tokenizer is not in {looked}: looked for encoder.json and vocab.bpe, vocab.json "
        "and merges.txt, or tokenizer.json; put them there, or pass --tokenizer DIR or a hub name "
        "such as openai-community/gpt2"
    )


def load_tokenizer(files: tuple[Path, ...]) -> Any:
    tokenizers = _import_tokenizers()
    try:
        if len(files) == 1:
            return tokenizers.Tokenizer.from_file(str(files[0]))
        bpe = tokenizers.models.BPE.from_file(*map(str, files))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{files[0]} is not a tokenizer of GPT-2's kind: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def encode(text: str, tokenizer: Any) -> tuple[Ints, Ints]:
    """All token ids, and where in them each article starts.

    A cut before a title falls between two words, so the ids are those of the text as a whole.
    """
    titles = [match.start(1) for match in TITLE.finditer(text)]
    cuts = [0, *titles[1:], len(text)]
    articles = tokenizer.encode_batch([text[a:b] for a, b in pairwise(cuts)], False, False)
    ids = [np.array(article.ids, dtype=np.int64) for article in articles]
    ends = np.cumsum([len(part) for part in ids])
    return np.concatenate(ids), np.concatenate([[0], ends[:-1]])


def _from_hub(name: str) -> Path:
    _import_tokenizers()
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # offline, unknown, no access: the first line says which
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"there is no tokenizer folder {name} and the hub gave none of that name: {reason}"
        ) from error


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise UserError("text needs the tokenizers package: pip install transformers") from error
    return tokenizers
