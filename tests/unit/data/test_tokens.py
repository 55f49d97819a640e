"""WikiText-2 to tokens: layouts, articles, and a cache that many ranks may make at once."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpc_oldsgd.data import text
from hpc_oldsgd.data import tokens as module
from hpc_oldsgd.data.tokens import Tokens, tokens
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.files import write_atomically
from support import ROOT
from support.data_files import REAL, needs_wikitext2, wikitext, write_bpe, write_wikitext


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_wikitext(tmp_path)
    write_bpe(tmp_path / "gpt2-bpe")
    return tmp_path


def read(data: Path, seq: int = 16) -> Tokens:
    vocabulary = text.find_tokenizer(None, data / "gpt2-bpe")
    return tokens(data / "wikitext-2" / "train.txt", vocabulary, seq)


@pytest.mark.parametrize(
    "layout",
    ["wikitext-2/{}.txt", "wikitext-2-raw/wiki.{}.raw", "wikitext-2/wiki.{}.tokens", "{}.txt"],
)
def test_either_layout_is_found(tmp_path, layout):
    write_wikitext(tmp_path, layout)
    found = text.find_wikitext(tmp_path)
    assert found == {s: tmp_path / layout.format(s) for s in ("train", "valid", "test")}
    (tmp_path / "kept").mkdir()
    write_bpe(tmp_path / "bpe")
    vocabulary = text.find_tokenizer(None, tmp_path / "bpe")
    made = {split: tokens(file, vocabulary, 16, tmp_path / "kept") for split, file in found.items()}
    for split, file in found.items():  # each has a cache of its own, also when it is read again
        ids = text.load_tokenizer(vocabulary).encode(file.read_text(encoding="utf-8")).ids
        again = tokens(file, vocabulary, 16, tmp_path / "kept")
        assert made[split].ids.tolist() == again.ids.tolist() == ids
    assert len({one.ids.tobytes() for one in made.values()}) == 3


@pytest.mark.parametrize("names", text.VOCABULARIES, ids=str)
def test_a_vocabulary_of_any_usual_name_gives_the_same_tokens(tmp_path, names):
    write_bpe(tmp_path / "a")
    reference = text.load_tokenizer(text.find_tokenizer(None, tmp_path / "a"))
    if len(names) == 2:
        write_bpe(tmp_path / "b", names)
    else:
        (tmp_path / "b").mkdir()
        reference.save(str(tmp_path / "b" / "tokenizer.json"))
    found = text.find_tokenizer(str(tmp_path / "b"))
    assert [file.name for file in found] == list(names)
    sentence = " the cold river , né 1904 \n Ωmega"
    assert text.load_tokenizer(found).encode(sentence).ids == reference.encode(sentence).ids


def test_tokens_are_those_of_the_whole_text_and_articles_start_at_titles(data):
    got = read(data)
    whole = (data / "wikitext-2" / "train.txt").read_text(encoding="utf-8")
    tokenizer = text.load_tokenizer(text.find_tokenizer(None, data / "gpt2-bpe"))
    assert got.ids.tolist() == tokenizer.encode(whole).ids
    assert len(got.articles) == 12 and got.vocab == tokenizer.get_vocab_size() == 300
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    for k, start in enumerate(got.articles):
        end = got.articles[k + 1] if k < 11 else len(got.ids)
        article = tokenizer.decode(got.ids[start:end].tolist())
        assert article.lstrip(" \n").startswith(f"= Article {k} = \n")
        assert article.count("= Article") == 1


def test_text_without_titles_is_one_article(tmp_path):
    write_bpe(tmp_path)
    tokenizer = text.load_tokenizer(text.find_tokenizer(None, tmp_path))
    ids, articles = text.encode("the tower = of = salt", tokenizer)
    assert articles.tolist() == [0] and len(ids) > 3


@pytest.mark.parametrize("seq", [1, 7, 16])
def test_every_token_but_the_first_is_a_target_once(data, seq):
    got = read(data, seq)
    m = len(got.labels)
    (rows,) = got.rows(np.arange(m))
    assert rows.shape == (m, seq + 1) and len(got.ids) - 1 - m * seq < seq
    assert np.array_equal(rows[:, 1:].ravel(), got.ids[1 : m * seq + 1])
    assert np.array_equal(rows[:, :-1].ravel(), got.ids[: m * seq])
    assert np.array_equal(got.rows(np.array([3, 1]))[0], rows[[3, 1]])
    for j in range(m):
        assert got.articles[got.labels[j]] <= j * seq
        assert got.labels[j] == 11 or got.articles[got.labels[j] + 1] > j * seq


def test_the_ids_are_mapped_and_the_rows_are_a_copy(data):
    got = read(data)
    assert isinstance(got.ids, np.memmap) and got.ids.dtype == np.uint16
    (rows,) = got.rows(np.arange(2))
    assert not isinstance(rows, np.memmap) or rows.base is None
    assert not np.shares_memory(rows, got.ids)


SCRIPT = """
import sys, hashlib
from pathlib import Path
from hpc_oldsgd.data import text, tokens
make, data = tokens._write, Path(sys.argv[1])
def counted(*args):
    with (data / "made").open("a") as file:
        file.write("once\\n")
    make(*args)
tokens._write = counted
print("ready", flush=True)
sys.stdin.readline()
vocabulary = text.find_tokenizer(None, data / "gpt2-bpe")
got = tokens.tokens(data / "wikitext-2" / "train.txt", vocabulary, 16)
print(hashlib.sha256(got.ids.tobytes()).hexdigest())
"""


def test_of_many_processes_one_makes_the_cache_and_all_read_it(data):
    (data / "wikitext-2" / "train.txt").write_bytes(wikitext(300).encode())
    command = [sys.executable, "-c", SCRIPT, str(data)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    jobs = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        for _ in range(3)
    ]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    said = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 3
    assert len(set(said)) == 1 and len(said[0].strip()) == 64
    assert (data / "made").read_text() == "once\n"


def test_a_lock_left_by_a_killed_process_does_not_hold_up_anybody(data):
    read(data)
    folder = data / "wikitext-2" / "hpc_oldsgd-cache"
    (lock,) = folder.glob(".*.lock")
    for file in folder.glob("train-*"):
        file.unlink()
    code = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1])\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(99)"
    )
    command = [sys.executable, "-c", code, str(lock)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert len(read(data).articles) == 12


def truncated(file: bytes) -> bytes:
    return file[:-7]


def flipped(file: bytes) -> bytes:
    return file[:-20] + bytes([file[-20] ^ 4]) + file[-19:]


def empty(file: bytes) -> bytes:
    return b""


def nested(file: bytes) -> bytes:
    return b"[" * 100_000


@pytest.mark.parametrize("damage", [truncated, flipped, empty, nested])
@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_a_damaged_cache_is_found_and_made_again(data, damage, suffix):
    good = read(data)
    ids, articles = good.ids.tolist(), good.articles.tolist()
    (file,) = (data / "wikitext-2" / "hpc_oldsgd-cache").glob("*" + suffix)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    again = read(data)
    assert again.ids.tolist() == ids and again.articles.tolist() == articles
    assert file.read_bytes() == content


def test_a_cache_that_is_there_is_used(data, monkeypatch):
    read(data)
    monkeypatch.setattr(module, "_write", None)
    assert len(read(data).articles) == 12


def test_other_text_or_another_vocabulary_is_another_cache(data):
    first = read(data).ids.tolist()
    path = data / "wikitext-2" / "train.txt"
    path.write_bytes(path.read_bytes() + b" the end")
    assert read(data).ids.tolist()[: len(first) - 3] == first[:-3]
    merges = data / "gpt2-bpe" / "vocab.bpe"
    merges.write_text("\n".join(merges.read_text(encoding="utf-8").split("\n")[:9]), "utf-8")
    assert len(read(data).ids) > len(first)
    assert len(list((data / "wikitext-2" / "hpc_oldsgd-cache").glob("*.json"))) == 3


def test_a_cache_goes_home_where_the_data_cannot_be_written_beside(data, monkeypatch):
    (data / "wikitext-2" / "hpc_oldsgd-cache").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "home"))
    read(data)
    assert len(list((data / "home" / "hpc_oldsgd").glob("train-*.npy"))) == 1


def test_a_cache_that_cannot_be_written_serves_what_is_in_it(data, tmp_path, monkeypatch):
    before = read(data)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert np.array_equal(read(data).ids, before.ids) and not (tmp_path / "home").exists()
    (data / "wikitext-2" / "train.txt").write_text("other words\n" * 30)
    with pytest.raises(UserError, match="neither can be written to"):
        read(data)


def test_a_disk_without_room_for_the_cache(data, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "home"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written \(.*home.*File too large\): make"):
            read(data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(read(data).ids) > 100


def test_a_quota_beside_the_data_sends_the_cache_home(data, monkeypatch):
    def write(path, content, **options):
        if "home" not in path.parts:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        write_atomically(path, content, **options)

    monkeypatch.setattr("hpc_oldsgd.data.tokens.write_atomically", write)
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "home"))
    read(data)
    assert len(list((data / "home" / "hpc_oldsgd").glob("train-*.npy"))) == 1


def test_missing_or_wrong_files_are_named_in_one_line(data, tmp_path):
    nowhere = tmp_path / "nowhere"
    (data / "gpt2-bpe" / "merges.txt").touch()
    cases = [
        (lambda: text.find_wikitext(nowhere), f"WikiText-2 is not in {nowhere}: looked for"),
        (lambda: text.find_tokenizer(None, nowhere), f"tokenizer is not in {nowhere}: looked"),
        (lambda: text.find_tokenizer(str(data)), f"tokenizer is not in {data}: looked for"),
        (lambda: read(data, seq=10**9), "has no sequence of 1000000000"),
    ]
    for call, words in cases:
        with pytest.raises(UserError) as error:
            call()
        assert words in str(error.value) and "\n" not in str(error.value)


def test_a_broken_vocabulary_and_text_that_is_not_utf8(data):
    train = data / "wikitext-2" / "train.txt"
    train.write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(UserError, match="is not UTF-8"):
        read(data)
    write_wikitext(data)
    (data / "gpt2-bpe" / "encoder.json").write_text("[1, 2")
    with pytest.raises(UserError, match="not a tokenizer of GPT-2's kind"):
        read(data)


def test_a_hub_name_without_a_network_is_one_line(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="no tokenizer folder nobody/nothing") as error:
        text.find_tokenizer("nobody/nothing")
    assert "\n" not in str(error.value)


@needs_wikitext2
def test_real_wikitext2(tmp_path):
    vocabulary = text.find_tokenizer(None, Path(REAL) / "gpt2-bpe")
    assert text.load_tokenizer(vocabulary).encode("Hello world").ids == [15496, 995]
    files = text.find_wikitext(Path(REAL))
    expected = {"train": (2_448_382, 600), "valid": (258_659, 60), "test": (295_877, 60)}
    for split, (count, articles) in expected.items():
        got = tokens(files[split], vocabulary, 256, cache=tmp_path)
        assert (len(got.ids), len(got.articles), got.vocab) == (count, articles, 50257)
    meta = json.loads(next(tmp_path.glob("train-*.json")).read_text())
    assert set(meta) == {"articles", "vocab", "sha256"}
