"""The memory node: owns segments, hands out slots, tells the index."""

from kvstore.node.config import NodeConfig
from kvstore.node.daemon import Node

__all__ = ["Node", "NodeConfig"]
