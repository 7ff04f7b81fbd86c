"""How bytes travel where there is no common memory: between hosts and between devices.

Empty so far: on one host a reader copies straight out of the node's segment
(client/reader.py).
"""
