"""The memory node: owns segments, hands out slots, tells the index."""

from kvstore.node.daemon import Node, NodeConfig

__all__ = ["Node", "NodeConfig"]
