"""What scripts/rdma-check takes for RDMA; the rest of it is run by people who have some."""

import importlib
import sys
from pathlib import Path

import pytest

LIB = Path(__file__).parents[2] / "scripts" / "lib"
SAID = """
W1121 06:52:56.612390   28442 ucx_enums.cpp:58] Unexpected UCX error: Input/output error
[1.2] [h:9:0]   +--------+-------------+-------------------+
[1.2] [h:9:0]   | client-9 self cfg#0                      |
[1.2] [h:9:0]   | remote memory read by ucp_get* into host memory from host |
[1.2] [h:9:0]   +--------+-------------+-------------------+
[1.2] [h:9:0]   | Range  | Description |    Config         |
[1.2] [h:9:0]   | 0..inf | zero-copy   | self/memory       |
[1.2] [h:9:0]   | client-9 {where} cfg#1                   |
[1.2] [h:9:0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [h:9:0]   | 0..inf | zero-copy   | tcp/lo            |
[1.2] [h:9:0]   | client-9 {where} cfg#1                   |
[1.2] [h:9:0]   | remote memory read by ucp_get* into host memory from host |
[1.2] [h:9:0]   | Range  | Description |    Config         |
[1.2] [h:9:0]   | 0..inf | zero-copy   | {over} |
"""


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(LIB))  # as for a module that is run
    try:
        return importlib.import_module("rdma.check")
    finally:
        sys.path.remove(str(LIB))


@pytest.mark.parametrize(
    ("over", "rdma"),
    [("rc_mlx5/mlx5_0:1/path0", True), ("dc_mlx5/mlx5_1:1", True), ("cma/memory", False)],
)
def test_only_a_transport_of_rdma_is_taken_for_rdma(script, over, rdma, capsys):
    taken = script.taken_transports(SAID.format(where="inter-node", over=over))
    assert taken == [over]
    code = script.verdict(script.Checks(), taken, has_device=rdma)
    assert code == (0 if rdma else 3)
    assert ("NO RDMA WAS FOUND" in capsys.readouterr().out) != rdma


def test_a_failed_check_is_the_verdict(script, capsys):
    checks = script.Checks()
    checks.say(False, "something")
    assert script.verdict(checks, ["rc_mlx5/mlx5_0:1"], has_device=True) == 1
    assert "NOT USABLE" in capsys.readouterr().out


def test_vram_that_cannot_be_read_is_told_apart_from_host_memory(script, capsys):
    taken = ["rc_mlx5/mlx5_0:1"]
    assert script.verdict(script.Checks(), taken, has_device=True, vram_read=False) == 4
    assert "VRAM CANNOT BE READ" in capsys.readouterr().out


def test_the_case_of_vram_says_what_it_lacks_and_fails_for_wrong_bytes(script, capsys):
    class Reading:
        reason = "it is not registered"
        blocks_right = script.BLOCKS

        def ready(self):
            return self.reason == ""

        def read(self, timeout_s):
            return script.BLOCKS, script.BLOCKS - self.blocks_right, 0.1

    reading, checks = Reading(), script.Checks()
    assert not script.read_vram(checks, reading, "")
    assert "it is not registered" in capsys.readouterr().out
    reading.reason = ""
    assert script.read_vram(checks, reading, "no CUDA driver")
    assert "NOT tried: the other side has no device (no CUDA driver)" in capsys.readouterr().out
    assert checks.failed == 0
    reading.blocks_right = 0
    script.read_vram(checks, reading, "")
    assert checks.failed == 1


def test_what_cannot_come_to_vram_is_a_verdict_of_its_own(script, capsys):
    class Reading:
        reason = "no context on the device"
        came, wrong = script.BLOCKS, 0

        def ready(self):
            return self.reason == ""

        def read(self, timeout_s):
            return self.came, self.wrong, 0.1

    reading, checks = Reading(), script.Checks()
    assert not script.to_vram_works(checks, reading, "memory")
    assert "from memory to VRAM: the first READ FAILED: no context" in capsys.readouterr().out
    reading.reason = ""
    assert script.to_vram_works(checks, reading, "memory")
    reading.came = script.BLOCKS - 1
    assert not script.to_vram_works(checks, reading, "memory"), "one came to host memory"
    assert checks.failed == 0
    reading.wrong = 1
    script.to_vram_works(checks, reading, "memory")
    assert checks.failed == 1
    taken = ["rc_mlx5/mlx5_0:1"]
    assert script.verdict(script.Checks(), taken, has_device=True, to_vram=False) == 5
    assert "leave the setting nixl_destination at host" in capsys.readouterr().out


def test_without_a_secret_it_does_not_start(script, monkeypatch):
    for name in ("KVSTORE_SECRET", "KVSTORE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="KVSTORE_SECRET"):
        script.secret()
