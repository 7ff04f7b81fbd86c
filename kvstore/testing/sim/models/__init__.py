"""Models what a simulated world has instead of a machine: files, memory, network, index, time."""
