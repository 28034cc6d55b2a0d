from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from pool import GlooPool

# The local servers are asked directly, whatever proxy the machine has for the rest.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    pool = GlooPool()
    yield pool
    pool.close()
