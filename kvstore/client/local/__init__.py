"""The nodes of this host: found, mapped, read in place, written to over the control socket."""
