from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

# Before it is imported: an assert of a helper tells its values, as one of a test does.
pytest.register_assert_rewrite("support")

from support.launcher import Launched, launch, start  # noqa: E402
from support.launches import launched  # noqa: E402
from support.pool import GlooPool  # noqa: E402

# Tests under nohup inherit that SIGHUP is ignored, and so would all that they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The local servers are asked directly, whatever proxy the machine has for the rest.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))


# Minutes each on two slow cores. The others prove an installation (`make test`); these are `make test-slow`.
SLOW = {
    *(
        "test_bad_steps",
        "test_benchmarks",
        "test_campaign",
        "test_communication",
        "test_cpu_products",
        "test_document_mask",
        "test_export",
        "test_fsdp1",
        "test_memory",
        "test_mistakes",
        "test_mix",
    ),
    *(
        "test_open_files",
        "test_parity",
        "test_preemption",
        "test_prepare",
        "test_remote",
        "test_resume",
        "test_server",
        "test_sharded_memory",
    ),
    *("test_sharding", "test_signals", "test_stream", "test_terminal_lost", "test_train_step", "test_units", "test_watchdog"),
}


def launches(test: pytest.Function) -> bool:
    """Whether the test uses a fixture that launches, or calls `launch` or `start` itself."""
    named = [getattr(test.module, name, None) for name in test.function.__code__.co_names]
    return not {"run", "launched"}.isdisjoint(test.fixturenames) or launch in named or start in named


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for test in items:
        if test.path.stem in SLOW:
            test.add_marker(pytest.mark.slow)
        if "pool" in test.fixturenames:
            test.add_marker(pytest.mark.ranks)
        if launches(test):
            test.add_marker(pytest.mark.launch)


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
