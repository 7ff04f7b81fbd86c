"""Tells others what a node holds: records and heartbeats to the index, events to routers."""
