"""What is called once the interpreter begins to end: by functions of `atexit`, and in threads that
outlive the main one. Such a process starts no more threads from Python 3.12 on, and executors take
no calls from any version on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis_servers import RedisServer
from stores import NodeProcess
from two_hosts import SECRET, client_of, listening_node

from kvstore import Client

VALUE = bytes(range(256)) * 40
ENDS_WITHIN_S = 60

PROLOGUE = """
import asyncio, atexit, faulthandler, sys, threading, time
from pathlib import Path
from kvstore import AsyncClient, Client, Limits, weights_fingerprint

faulthandler.dump_traceback_later(40, exit=True)
url, prefix, run_dir = sys.argv[1:]
options = {"url": url, "key_prefix": prefix, "run_dir": Path(run_dir)}
options["limits"] = Limits(redis_timeout_s=5, request_timeout_s=10, stream_timeout_s=10)
VALUE = bytes(range(256)) * 40


def after_main(work):
    def wait():
        threading.main_thread().join()
        if sys.version_info >= (3, 12):
            began = time.monotonic()
            while time.monotonic() < began + 20:
                try:
                    threading.Thread(target=int).start()
                except RuntimeError:
                    break
        work()

    threading.Thread(target=wait).start()
"""

WAYS = {"at exit": "atexit.register(work)", "in a thread that outlives main": "after_main(work)"}


def ran(node: NodeProcess, program: str, run_dir: Path | None = None) -> str:
    """What the program printed; it ended in time, and well."""
    options = node.client_options
    where = (options["url"], options["key_prefix"], str(run_dir or options["run_dir"]))
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + program, *where],
        env={**os.environ, "KVSTORE_SECRET": SECRET},
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opened", [True, False], ids=["opened before", "first used then"])
def test_an_async_client_does_all_that_it_does_at_other_times(
    far: NodeProcess, way: str, opened: bool
) -> None:
    program = f"""
loop = asyncio.new_event_loop()
c = AsyncClient(**options)

async def calls():
    print(bool(await c.put("a", VALUE)), await c.get("a") == VALUE, await c.get("b"))
    print(await asyncio.gather(*(c.exists(k) for k in "aabab")))
    print(bool(await c.health()), await c.delete("a"))
    await c.close()

def work():
    loop.run_until_complete(calls())
    loop.close()

if {opened}:
    loop.run_until_complete(c.put("before", VALUE))
{WAYS[way]}
"""
    assert ran(far, program).splitlines() == [
        "True True None",
        "[True, True, False, True, False]",
        "True True",
    ]


def test_an_async_client_is_closed_at_exit(far: NodeProcess) -> None:
    program = """
loop = asyncio.new_event_loop()
c = AsyncClient(**options)
print(bool(loop.run_until_complete(c.put("k", VALUE))))
atexit.register(lambda: (print(loop.run_until_complete(c.close())), loop.close()))
"""
    assert ran(far, program).split() == ["True", "None"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opened", [True, False], ids=["opened before", "first used then"])
def test_blocks_of_several_other_hosts_are_read(
    redis_server: RedisServer,
    far: NodeProcess,
    writer: Client,
    elsewhere: Path,
    way: str,
    opened: bool,
) -> None:
    program = f"""
c = Client(**options) if {opened} else None

def work():
    with c or Client(**options) as client:
        found = client.get_many(["here", "there", "nowhere"])
        print([value == VALUE for value in found], client.put("mine", VALUE).status)

{WAYS[way]}
"""
    with (
        listening_node(redis_server, key_prefix=far.key_prefix) as second,
        client_of(second) as another,
    ):
        assert writer.put("here", VALUE)
        assert another.put("there", VALUE)
        assert ran(far, program, elsewhere) == "[True, True, False] stored\n"


@pytest.mark.parametrize("way", WAYS)
def test_an_index_with_a_name_is_found(far: NodeProcess, way: str) -> None:
    """Names are looked up in a thread at other times."""
    program = f"""
from kvstore.system import tcp

def work():
    print(len(tcp.addresses("localhost", 80, time.monotonic() + 10)) > 0)

{WAYS[way]}
"""
    assert ran(far, program) == "True\n"


@pytest.mark.parametrize("way", WAYS)
def test_weights_have_their_fingerprint(far: NodeProcess, tmp_path: Path, way: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(VALUE)
    (tmp_path / "b.safetensors").write_bytes(VALUE)
    program = f"""
before = weights_fingerprint({str(tmp_path)!r})
{WAYS[way].replace("work", f"lambda: print(weights_fingerprint({str(tmp_path)!r}) == before)")}
"""
    assert ran(far, program) == "True\n"


def test_a_read_of_weights_that_hangs_keeps_no_process_from_its_end(
    far: NodeProcess, tmp_path: Path
) -> None:
    (tmp_path / "a.safetensors").write_bytes(VALUE)
    program = f"""
from kvstore import DeadlineError, weights

weights._digest = lambda *_: time.sleep(1000)
try:
    weights_fingerprint({str(tmp_path)!r}, timeout_s=0.1)
except DeadlineError:
    print("late")
"""
    assert ran(far, program) == "late\n"
