"""Plants bugs and looks whether a test notices: `scripts/mutants`."""
