"""How often an explanation of a dump is right: on mutants, on single faults, on what is healthy."""
