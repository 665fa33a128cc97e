"""Worker processes: each runs one test at a time, so that a crash or a hang fails only one test."""
