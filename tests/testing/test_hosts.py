"""Hosts as network namespaces: who reaches whom, before, while and after a cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import UsageError
from kvstore.testing.hosts import SWITCH, Hosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    connection.settimeout(1)
    try:  # whoever was cut off may leave half a connection behind
        connection.sendall(connection.recv(64))
    except OSError:
        pass
    connection.close()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2])) as s:
    s.sendall(b"hello")
    sys.exit(0 if s.recv(64) == b"hello" else 3)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        for host in (*made.names, SWITCH):
            server = made.popen(
                host, [sys.executable, "-c", ECHO, made.address(host)], stdout=subprocess.PIPE
            )
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
        yield made


def reaches(hosts: Hosts, source: str, target: str, timeout_s: float = 20.0) -> bool:
    ask = [sys.executable, "-c", ASK, hosts.address(target), str(timeout_s)]
    return hosts.popen(source, ask, stderr=subprocess.DEVNULL).wait(timeout_s + 20) == 0


def test_every_host_reaches_every_other_and_the_switch(hosts):
    assert reaches(hosts, "a", "b")
    assert reaches(hosts, "c", "a")
    assert reaches(hosts, "b", SWITCH)


def test_a_cut_loses_packets_between_two_hosts_and_no_others(hosts):
    hosts.cut("a", "b")
    try:
        assert not reaches(hosts, "a", "b", 1.0)
        assert not reaches(hosts, "b", "a", 1.0)
        assert reaches(hosts, "a", "c")
    finally:
        hosts.join("a", "b")
    assert reaches(hosts, "a", "b")
    assert reaches(hosts, "b", "a")


def test_a_one_way_cut_loses_packets_of_one_host_only(hosts):
    hosts.cut("a", "b", one_way=True)
    try:
        assert neighbour(hosts, "a", "b") == "PERMANENT"
        assert neighbour(hosts, "b", "a") != "PERMANENT"
        assert not reaches(hosts, "a", "b", 1.0)
    finally:
        hosts.join("a", "b")
    assert reaches(hosts, "a", "b")


def neighbour(hosts: Hosts, source: str, target: str) -> str:
    """What `source` does with frames for `target`."""
    command = ["ip", "-n", hosts.space(source), "neigh", "show", hosts.address(target)]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return words[-1] if words else ""


def test_an_isolated_host_reaches_nobody_and_comes_back(hosts):
    with hosts.isolated("b"):
        assert not reaches(hosts, "b", "a", 1.0)
        assert not reaches(hosts, SWITCH, "b", 1.0)
        assert reaches(hosts, "a", "c")
    assert reaches(hosts, "b", "a")


def test_a_paused_host_accepts_and_does_not_answer(hosts):
    hosts.pause("c")
    try:
        assert not reaches(hosts, "a", "c", 1.0)
    finally:
        hosts.resume("c")
    assert reaches(hosts, "a", "c")


def test_close_ends_every_process_and_every_namespace():
    with Hosts(1, name="kvtest-close") as hosts:
        server = hosts.popen("a", [sys.executable, "-c", ECHO, hosts.address("a")])
    assert server.wait(20) == -9
    with pytest.raises(UsageError):
        Hosts.existing("kvtest-close")
    hosts.close()


def test_another_process_finds_a_cluster_by_its_name(hosts):
    assert Hosts.existing(hosts.name).names == hosts.names


def test_a_second_cluster_of_the_same_name_is_refused_and_harms_nothing(hosts):
    with pytest.raises(UsageError, match="name"), Hosts(3, name=hosts.name):
        pass
    assert reaches(hosts, "a", "b")


@pytest.mark.parametrize("count", [0, 27])
def test_a_number_of_hosts_out_of_range_is_refused_by_name(count):
    with pytest.raises(UsageError, match="count"):
        Hosts(count)


def test_a_host_that_is_not_there_is_refused_by_name(hosts):
    with pytest.raises(UsageError, match="host"):
        hosts.address("z")


def test_a_visitor_is_on_the_host_and_comes_back(hosts):
    home = Path("/proc/thread-self/ns/net").stat().st_ino
    with hosts.visit("b"):
        assert Path("/proc/thread-self/ns/net").stat().st_ino != home
        with socket.create_connection((hosts.address("a"), 7), timeout=20) as connection:
            assert connection.getsockname()[0] == hosts.address("b")
    assert Path("/proc/thread-self/ns/net").stat().st_ino == home
    with pytest.raises(UsageError, match="host"), hosts.visit("z"):
        pass


def test_what_cannot_be_removed_does_not_keep_the_rest(monkeypatch):
    made = Hosts(2, name=f"kvrest{os.getpid()}")
    made.start()
    run = subprocess.run

    def stuck(command, **options):
        if command[:3] == ["ip", "netns", "pids"] and command[3] == made.space("a"):
            raise subprocess.TimeoutExpired(command, 0.0)
        return run(command, **options)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "run", stuck)
            made.close()
        there = run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    finally:
        made.close()
    assert made.space("b") not in there
    assert made.space(SWITCH) not in there
