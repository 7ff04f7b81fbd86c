"""Moves bytes between a node's memory and a reader's or writer's.

`base` is the contract and `registry` names all of them. On one host a reader mostly looks at the
node's segment in place (client/reader.py); transports are for what must travel.
"""
