"""Stores that several processes share."""

from collections.abc import Iterator

import pytest
from databases import postgresql


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/studies.db"
        return
    with postgresql() as server:
        yield server
