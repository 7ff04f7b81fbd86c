"""Nodes of other hosts: who is there, reading from many at once, saving to one of them."""
