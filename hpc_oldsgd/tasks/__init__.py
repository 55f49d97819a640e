"""The tasks. This list is the only one; everything else asks the registry."""

# ruff: noqa: I001  the order here is the order of every list

from ..data import seed_model, seed_step
from .base import OnDisk, Task
from .registry import get, names, register, registry

from .digits import Digits, Logistic
from .cifar10 import Cifar10ResNet18, Cifar10Small, Cifar10VGG11
from .wikitext2 import WikiText2GPT2

__all__ = [
    "Cifar10ResNet18",
    "Cifar10Small",
    "Cifar10VGG11",
    "Digits",
    "Logistic",
    "OnDisk",
    "Task",
    "WikiText2GPT2",
    "get",
    "names",
    "register",
    "registry",
    "seed_model",
    "seed_step",
]
