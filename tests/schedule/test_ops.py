"""The grammar of operations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.schedule.ops import Kind, Op, backward, forward


def test_text_by_hand() -> None:
    assert str(forward(3)) == "0F3"
    assert str(backward(0, stage=2)) == "2B0"
    assert Op.parse(" 12F345 ") == Op(12, Kind.FORWARD, 345)


@settings(max_examples=50, deadline=None)
@given(st.builds(Op, st.integers(0, 999), st.sampled_from(Kind), st.integers(0, 99_999)))
def test_parse_inverts_str(op: Op) -> None:
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F3", "0F", "0X3", "0F3B", "-1F3", "0 F3"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not STAGE KIND MICROBATCH"):
        Op.parse(text)
