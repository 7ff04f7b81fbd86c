"""Holds what the operating system gives: files and locks, memory, processes, sockets, clocks."""
