"""Faults of engines: each makes the simulated engine wrong while its context is open."""
