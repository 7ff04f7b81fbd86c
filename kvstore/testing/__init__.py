"""Holds the simulator and the models, for tests of ours and yours. Production never imports it."""
