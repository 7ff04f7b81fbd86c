"""The control socket of a node: who may connect, whose turn it is, and which clients still live."""
