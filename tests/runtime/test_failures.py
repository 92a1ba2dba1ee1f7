"""An error says which process was doing what."""

from __future__ import annotations

import pytest

from prefixflow.runtime.failures import doing


def test_an_error_is_told_what_it_interrupted() -> None:
    with pytest.raises(RuntimeError, match="reset by peer") as caught, doing("agreeing on the plan"):
        raise RuntimeError("reset by peer")
    assert "while agreeing on the plan" in "".join(caught.value.__notes__)
    with doing("nothing that fails"):
        pass
