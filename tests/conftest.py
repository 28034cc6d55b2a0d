from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from launcher import Launched
from launches import launched
from pool import GlooPool

# The local servers are asked directly, whatever proxy the machine has for the rest.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    pool = GlooPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launched]:
    """A run of launches.py by name, launched when it is first asked for."""
    done: dict[str, Launched] = {}

    def get(name: str) -> Launched:
        if name not in done:
            done[name] = launched(name, tmp_path_factory.mktemp("run") / "out")
        return done[name]

    return get
