from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

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
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Launched]]:
    """A run of launches.py by name. At the first question those that tests ask for by a parameter are launched, two at a time: half of a
    launch is imports in one process."""
    asked = [item.callspec.params.get("name") for item in request.session.items if "run" in item.fixturenames and hasattr(item, "callspec")]
    futures: dict[str, Future[Launched]] = {}
    with ThreadPoolExecutor(2) as executor:

        def ask(name: str) -> Future[Launched]:
            if name not in futures:
                futures[name] = executor.submit(launched, name, tmp_path_factory.mktemp("run") / "out")
            return futures[name]

        def get(name: str) -> Launched:
            first = ask(name)
            for other in filter(None, asked):
                ask(other)
            return first.result()

        yield get
        executor.shutdown(cancel_futures=True)
