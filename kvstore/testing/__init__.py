"""Shipped for tests, ours and yours: the simulator and the models. Production never imports it."""
