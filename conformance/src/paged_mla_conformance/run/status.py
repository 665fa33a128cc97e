"""Exit statuses of the command: pytest's, without the time that importing pytest takes."""

INTERRUPTED = 2
BROKEN_BACKEND = 2
USAGE_ERROR = 4
NO_TESTS_COLLECTED = 5
