"""For every test: one that needs what this machine lacks is skipped, and says why.

Also the real Redis processes that several folders share (support/processes/redis_servers.py).
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_driver import FAKE, FakeDriver
from hypothesis import settings
from redis_servers import RedisCluster, RedisSentinel, RedisServer
from stores import NodeProcess

from kvstore import Client

# A commit's result is the commit's, not luck's: the same examples each time. Others are
# drawn by `scripts/nightly`. No example has a deadline: machines are shared.
settings.register_profile("commit", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("night", deadline=None, print_blob=True)
settings.load_profile("commit")


# A lane of scripts/test is a background process, in which the shell has SIGINT ignored: tests of
# Ctrl-C, and the processes that they start, are to have it as in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Import vLLM before the first test that needs it: on a busy machine that takes most of the
    time that a test has, and what a time-out interrupts stays half imported."""
    wanted = any(item.get_closest_marker("vllm") for item in session.items)
    if wanted and not session.config.option.collectonly and find_spec("vllm") is not None:
        importlib.import_module("vllm.v1.core.sched.scheduler")


PROCESSOR_S_MAX = 5.0
SMOKES_MAX = 5
BEGAN_S = pytest.StashKey[float]()
PROGRAMS = {"browser": ("chromium", "chromedriver"), "prometheus": ("prometheus", "promtool")}
"""What tests of these marks start. `.ci/run` installs it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "processor_slack",
        "How many times PROCESSOR_S_MAX an item may take that is not long; 0: any time.",
        default="0",
    )


def _processor_s() -> float:
    """Return the processor time of this process and of the children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    # The call alone: what ends with the last test of a room, a pool of processes, was for all.
    item.stash[BEGAN_S] = _processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail what takes long and is not marked so: `scripts/test` is waited for."""
    report = yield
    slack = float(item.config.getini("processor_slack"))
    free = any(item.get_closest_marker(mark) for mark in ("long", "nightly", "smoke"))
    if call.when != "call" or not report.passed or not slack or free:
        return report
    took_s = _processor_s() - item.stash[BEGAN_S]
    if took_s > slack * PROCESSOR_S_MAX:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} took {took_s:.0f} s of processor: what takes over "
            f"{PROCESSOR_S_MAX:.0f} s is marked long, or made cheaper"
        )
    return report


def _missing() -> dict[str, str]:
    """Marks whose tests cannot run here, and why."""
    missing = {}
    if find_spec("vllm") is None:
        missing["vllm"] = "vLLM is not installed (scripts/setup says why)"
    for mark, name in (("sglang", "SGLang"), ("lmcache", "LMCache")):
        # There it is what is tested: to skip its tests would be to pass without them.
        if find_spec(mark) is None and os.environ.get("KVSTORE_TESTED_ENGINE") != mark:
            missing[mark] = f"{name} is not installed (scripts/test-engines {mark})"
    # tests/cuda/test_bindings.py runs some of them over a stand-in for the driver.
    if not Path("/dev/nvidiactl").exists() and FAKE not in os.environ:
        missing["gpu"] = "no CUDA device"
    for mark, programs in PROGRAMS.items():
        if absent := [name for name in programs if shutil.which(name) is None]:
            missing[mark] = f"no {absent[0]} here (CONTRIBUTING.md says how to install it)"
    return missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    smokes = [item.nodeid for item in items if item.get_closest_marker("smoke")]
    if len(smokes) > SMOKES_MAX:
        raise pytest.UsageError(f"{SMOKES_MAX} smokes at most, the rest is long: {smokes}")
    for mark, why in _missing().items():
        for item in items:
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish() -> None:
    """Each lane of scripts/test collects: vLLM takes 10 s of processor time to import."""
    if "vllm" in sys.modules:
        raise pytest.UsageError("a file of tests imports vLLM at its head: import it where it runs")
    gc.freeze()  # what was collected stays: no collection of garbage looks through it


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    cluster = RedisCluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def redis_sentinel() -> Iterator[RedisSentinel]:
    sentinel = RedisSentinel()
    yield sentinel
    sentinel.close()


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[NodeProcess]:
    """A memory node in a process of its own, with nobody else's blocks in it."""
    with NodeProcess(redis_server) as process:
        yield process


@pytest.fixture
def client(node: NodeProcess) -> Iterator[Client]:
    with Client(**node.client_options) as client:
        yield client
