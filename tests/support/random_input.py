"""What the tests with random input share: kinds of values, and reading that may only refuse."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from hpc_oldsgd.errors import UserError

CASES = int(os.environ.get("CASES", "25"))  # of each test; `make fuzz` has thousands
cases = settings(max_examples=CASES)
numbers = st.one_of(
    st.integers(-3, 12).map(str),
    st.floats(width=32).map(str),
    st.sampled_from(["1e300", "1e999", "-0", "nan", "9223372036854775807", "1_0", "0x1", "", "#"]),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


def refused_or(read: Callable[[], Any], kind: type[Exception] = UserError) -> Any:
    """The result, or None where it was refused in one line; any other error is a failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return read()
    except kind as error:
        message = str(error)  # may repeat a strange name; `guard` then makes it one line
        assert message.strip() and len(message) < 500, message
        return None
