"""A process without file descriptors meets errors of this project, with their remedy."""

import asyncio
import os
import resource
import subprocess

import pytest
from warm_processes import WarmProcess

from kvstore import AsyncClient, Client
from kvstore.errors import KVStoreError, PeerError

OPEN_MAX = 256


def fill(spare: int) -> None:
    """Leave the process `spare` more file descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_MAX, hard))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for fd in held[:spare]:
            os.close(fd)


def construct(run_dir) -> str:
    fill(0)
    try:
        Client(run_dir=run_dir)
    except PeerError as e:
        return str(e)
    return "opened"


def construct_async(run_dir) -> str:
    async def get() -> object:
        client = AsyncClient(run_dir=run_dir)
        fill(0)
        return await client.get("k")

    try:
        return repr(asyncio.run(get()))
    except PeerError as e:
        return str(e)


def call(run_dir) -> str:
    client = Client(run_dir=run_dir)
    fill(0)
    assert client.get("k") is None
    assert client.get_many(["k"]) == [None]
    assert not client.put_many({"k": b"v"})[0]
    told = client.put("k", b"v")
    assert not told
    for one in (client.pin, client.delete):
        with pytest.raises(KVStoreError):
            one("k")
    client.close()
    return str(told.reason)


def say(which, run_dir) -> None:
    print(which(run_dir), flush=True)


@pytest.mark.parametrize("which", [construct, construct_async, call])
def test_without_file_descriptors_the_remedy_is_named(tmp_path, monkeypatch, which):
    monkeypatch.delenv("KVSTORE_URL", raising=False)
    process = WarmProcess(say, which, tmp_path, stdout=subprocess.PIPE)
    said = process.stdout.read()
    assert process.wait(60) == 0
    assert "ulimit -n" in said
