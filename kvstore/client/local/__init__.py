"""Finds the nodes of this host, maps them, reads in place and writes over the control socket."""
