from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig
from kvstore.node.epoch import EPOCH_MAX, next_epoch


def test_the_epoch_is_the_time_and_grows_within_one_second(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path, "n", 1000.9) for _ in range(3)] == [1000, 1001, 1002]
    assert next_epoch(tmp_path, "n", 5000.0) == 5000


def test_the_epoch_grows_when_the_clock_is_set_back(tmp_path: Path) -> None:
    assert next_epoch(tmp_path, "n", 1000.0) == 1000
    assert next_epoch(tmp_path, "n", 10.0) == 1001


def test_nodes_count_their_epochs_apart(tmp_path: Path) -> None:
    next_epoch(tmp_path, "n", 1000.0)
    assert next_epoch(tmp_path, "m", 10.0) == 10


@pytest.mark.parametrize("left", ["", "x", "-7", "12 13"])
def test_a_damaged_record_of_the_epoch_leaves_the_time(tmp_path: Path, left: str) -> None:
    next_epoch(tmp_path, "n", 1.0)
    (tmp_path / "epochs" / "n").write_text(left)
    assert next_epoch(tmp_path, "n", 1000.0) == 1000


def test_an_epoch_that_fits_no_record_is_refused(tmp_path: Path) -> None:
    next_epoch(tmp_path, "n", EPOCH_MAX)
    with pytest.raises(UsageError, match="epoch"):
        next_epoch(tmp_path, "n", 1000.0)


def test_a_node_that_starts_again_at_once_has_a_larger_epoch(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        config = NodeConfig(run_dir=tmp_path, name="n", size_bytes=1 << 20)
        with Node(config, MemoryIndex()) as node:
            epochs.append(node.announcement.epoch)
    assert epochs == sorted(set(epochs))
    assert not (tmp_path / "nodes" / "n").exists()
