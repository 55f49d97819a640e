"""Helpers of the tests, one of each kind. `from support import ...` works in every test."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
# For processes that a test starts: they import the package and these helpers.
PYTHONPATH = f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
