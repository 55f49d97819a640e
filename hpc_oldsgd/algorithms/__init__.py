"""The algorithms, one file each. This list is the only one; everything else asks the registry."""

# ruff: noqa: I001  the order of the paper's table is the order of every table

from .base import Algorithm, require, state
from .registry import get, names, near_tau, register, registry, with_tau

from .oldsgd import OLDSGD
from .ldsgd import LDSGD
from .dsgd import DSGD, DSGDCTA
from .kgt import KGT
from .lugt import LUGT
from .led import LED
from .lsgd import LSGD
from .olgt import OLGT
from .oled import OLED
from .cocod import CoCoDSGD
from .overlap_local_sgd import OverlapLocalSGD
from .co2 import CO2
from .xoldsgd import XOLDSGD
from .dga import DGA
from .diloco import DiLoCo
from .eager_diloco import EagerDiLoCo
from .noloco import NoLoCo
from .moldsgd import MOLDSGD

__all__ = [
    "CO2",
    "DGA",
    "DSGD",
    "DSGDCTA",
    "KGT",
    "LDSGD",
    "LED",
    "LSGD",
    "LUGT",
    "MOLDSGD",
    "OLDSGD",
    "OLED",
    "OLGT",
    "XOLDSGD",
    "Algorithm",
    "CoCoDSGD",
    "DiLoCo",
    "EagerDiLoCo",
    "NoLoCo",
    "OverlapLocalSGD",
    "get",
    "names",
    "near_tau",
    "register",
    "registry",
    "require",
    "state",
    "with_tau",
]
