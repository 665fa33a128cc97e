"""A run of the suite: the command, the pytest plugin, worker processes and the verdict."""
