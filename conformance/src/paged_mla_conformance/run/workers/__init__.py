"""Worker processes: they run tests one at a time, so that a crash or a hang fails one test."""
