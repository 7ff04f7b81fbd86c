"""The disks of a node at work: they are opened, written, and told what must not come back."""
