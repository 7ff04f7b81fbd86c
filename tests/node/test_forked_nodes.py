"""A node inside a process that forks ends with that process, not with its last child."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis_servers import wait_until
from stores import NodeThread
from warm_processes import WarmProcess

from kvstore import Client
from kvstore.nodedir import node_dirs, sweep
from kvstore.segment.abandoned import segments


def serve_and_fork(url: str) -> None:
    """Say the run directory and the number of a child that waits, and wait."""
    with NodeThread(SimpleNamespace(url=url), size_bytes=4 << 20) as node:
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        print(node.run_dir, node.client_options["key_prefix"], child, flush=True)
        signal.pause()


def test_a_node_of_a_killed_process_is_dead_although_a_child_of_it_lives(redis_server):
    process = WarmProcess(serve_and_fork, redis_server.url, stdout=subprocess.PIPE)
    run_dir, key_prefix, number = process.stdout.readline().split()
    child = int(number)
    try:
        options = {"url": redis_server.url, "run_dir": run_dir, "key_prefix": key_prefix}
        with Client(**options) as client:
            assert client.put("k", b"v")
        (directory,) = node_dirs(Path(run_dir))
        assert directory.alive()
        head = directory.announcement().head_path
        process.kill()
        process.wait(10)
        wait_until(lambda: not directory.alive(), "the node counts as dead")
        owned = {f"{s.base}.head": s.owned for s in segments()}
        assert owned[head] is False
        assert sweep(Path(run_dir), kept=True) == [directory.name]
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        shutil.rmtree(run_dir, ignore_errors=True)


@pytest.mark.parametrize("what", ["close", "write"])
def test_a_child_of_a_nodes_process_changes_nothing_of_the_node(redis_server, what):
    with NodeThread(redis_server, size_bytes=4 << 20) as node, Client(**node.client_options) as c:
        assert c.put("k", b"v" * 100_000)
        segment = node.node.segment
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            signal.alarm(20)
            if what == "close":
                c.close()
                node.node.stop()
            else:
                segment._head[0:4096] = bytes(4096)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == (0 if what == "close" else -signal.SIGSEGV)
        assert c.get("k") == b"v" * 100_000
        assert c.put("j", b"w" * 100_000)
