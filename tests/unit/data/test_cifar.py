"""CIFAR-10 files: read as torchvision reads them, checked before they are unpickled."""

from __future__ import annotations

import hashlib
import pickle
import re
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from hpc_oldsgd import tasks
from hpc_oldsgd.data import cifar, torchvision_shim
from hpc_oldsgd.errors import UserError
from support.data_files import REAL, needs_cifar10, write_cifar10


def torchvisions(root: Path, checksums: dict[str, dict[str, str]], train: bool):
    """The same files through torchvision's own reader, an independent reference."""
    base = torchvision_shim.load("the test").datasets.CIFAR10
    own = {
        "train_list": list(checksums["train"].items()),
        "test_list": list(checksums["test"].items()),
        "meta": base.meta | {"md5": checksums["meta"]["batches.meta"]},
    }
    return type("Small", (base,), own)(str(root), train=train)


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_those_of_torchvision(tmp_path, split):
    checksums = write_cifar10(tmp_path)
    reference = torchvisions(tmp_path, checksums, split == "train")
    source = cifar.Cifar10(tmp_path, split, checksums=checksums[split])
    assert source.labels.tolist() == reference.targets
    some = np.random.default_rng(0).permutation(len(source.labels))[:31]
    images, labels = source.rows(some)
    assert np.array_equal(images.transpose(0, 2, 3, 1), reference.data[some])
    assert np.array_equal(labels, source.labels[some])
    assert source.rows(some[:0])[0].shape == (0, 3, 32, 32)


def test_a_task_reads_normalised_images(tmp_path):
    checksums = write_cifar10(tmp_path)
    task = tasks.get("cifar10-vgg11")(data_dir=tmp_path)
    task.checksums = checksums
    x, y = task.test_set().collate(task.test_set().rows, None)
    reference = torchvisions(tmp_path, checksums, train=False)
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    expected = (reference.data / 255 - mean) / std
    assert np.allclose(x.numpy().transpose(0, 2, 3, 1), expected, atol=1e-5)
    assert y.tolist() == reference.targets


def test_a_changed_file_is_refused_and_never_unpickled(tmp_path):
    checksums = write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    trap = tmp_path / "executed"
    path.write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(UserError, match="data_batch_3 is not CIFAR-10's data_batch_3: its MD5"):
        _ = cifar.Cifar10(tmp_path, "train", checksums=checksums["train"]).labels
    assert not trap.exists()
    pickle.loads(path.read_bytes())
    assert trap.exists()  # the trap works: it was the checksum that held it back


class Trap:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_generated_files_do_not_pass_for_the_published_ones(tmp_path):
    write_cifar10(tmp_path)
    with pytest.raises(UserError, match="its MD5 differs"):
        tasks.get("cifar10-resnet18")(data_dir=tmp_path).labels()


def test_missing_data_says_what_where_and_how(tmp_path, monkeypatch):
    with pytest.raises(UserError) as error:
        tasks.get("cifar10-vgg11")(data_dir=tmp_path).shard(0, 2)
    message = str(error.value)
    assert str(tmp_path / "cifar-10-batches-py" / "data_batch_1") in message
    assert "--download" in message and "\n" not in message
    monkeypatch.delenv("HPC_OLDSGD_DATA", raising=False)
    with pytest.raises(UserError, match="--data-dir DIR or set HPC_OLDSGD_DATA"):
        tasks.get("cifar10-vgg11")().labels()
    monkeypatch.setenv("HPC_OLDSGD_DATA", str(tmp_path))
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        tasks.get("cifar10-vgg11")().labels()


def test_download_fetches_checks_and_unpacks(tmp_path, monkeypatch):
    """torchvision's own download, from a server of our own."""
    checksums = write_cifar10(tmp_path / "there")
    archive = tmp_path / "there" / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "there" / "cifar-10-batches-py", "cifar-10-batches-py")
    dataset = torchvision_shim.load("the test").datasets.CIFAR10
    handler = partial(SimpleHTTPRequestHandler, directory=str(archive.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(dataset, "url", f"{address}/{archive.name}")
    monkeypatch.setattr(dataset, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(dataset, "train_list", list(checksums["train"].items()))
    monkeypatch.setattr(dataset, "test_list", list(checksums["test"].items()))
    meta = dataset.meta | {"md5": checksums["meta"]["batches.meta"]}
    monkeypatch.setattr(dataset, "meta", meta)
    task = tasks.get("cifar10-vgg11")(data_dir=tmp_path / "here", download=True)
    assert len(task.shard(1, 3)) == 67
    with monkeypatch.context() as patch:  # it is all there: nothing is written, not even a lock
        patch.setattr(cifar, "lock", lambda path: pytest.fail("a lock in a read-only folder"))
        cifar.download(tmp_path / "here")
    monkeypatch.setattr(dataset, "url", f"{address}/nothing.tar.gz")
    with pytest.raises(UserError, match=r"could not be fetched from http.*404") as error:
        tasks.get("cifar10-vgg11")(data_dir=tmp_path / "new", download=True).labels()
    server.shutdown()
    assert "\n" not in str(error.value)


def test_the_shim_declares_operators_only_where_the_native_library_does_not_load():
    torchvision = torchvision_shim.load("the test")
    native = torchvision.extension._has_ops()
    assert bool(torchvision_shim._declared) != native
    before = len(torchvision_shim._declared)
    torchvision_shim.prepare()
    assert len(torchvision_shim._declared) == before


@needs_cifar10
def test_real_cifar10():
    task = tasks.get("cifar10-vgg11")(data_dir=Path(REAL))
    reference = torchvision_shim.load("the test").datasets.CIFAR10(REAL)
    assert task.labels().tolist() == reference.targets
    own = task.shard(4, 9, "label:0.7", seed=1)
    assert len(own) in (5555, 5556) and own.nbytes == len(own) * (3072 + 8)
    assert np.array_equal(own.rows[0].transpose(0, 2, 3, 1), reference.data[own.indices])
    assert task.count("test") == 10_000
