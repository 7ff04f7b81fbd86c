"""Decides what a memory node does. Pure: no I/O, no clock, no threads, no torch.

What arrives is an event with its `now`; what leaves is a list of effects for
someone else to carry out. That is why the simulator can run all of it.
"""
