"""Tests of the suite itself: mutants, explained dumps, the envelope of sizes and stored vectors."""
