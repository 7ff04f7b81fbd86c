"""Decides what a node keeps on its disks: which block goes where, what is written over, and what
must never come back. No I/O, no clock: `now` is given, and the writer thread tells what it did."""
