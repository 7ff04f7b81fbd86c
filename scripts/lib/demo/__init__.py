"""Shows the main job, two producers and two consumers: `scripts/demo`."""
