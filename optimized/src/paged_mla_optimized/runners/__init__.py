"""How one problem of the conformance suite is run: a module for each way of launching."""
