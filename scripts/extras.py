"""Prints what the extras named on the command line require; pip alone would build all anew."""

import re
import sys
from importlib.metadata import requires

for requirement in requires("hpc_oldsgd") or []:
    name, _, marker = requirement.partition(";")
    extra = re.search(r"extra == ['\"](\w+)", marker)
    if extra and extra[1] in sys.argv[1:] and not name.startswith("hpc"):
        print(name.strip())
