"""The control socket of a node: who may connect, whose turn it is, and who of them still lives."""
