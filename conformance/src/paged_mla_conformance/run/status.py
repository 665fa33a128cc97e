"""Exit statuses of the command. They equal pytest's; importing pytest would take too long."""

INTERRUPTED = 2
BROKEN_BACKEND = 2
USAGE_ERROR = 4
NO_TESTS_COLLECTED = 5
