"""Check a dump: find the fields that it lacks, the rules that it breaks, and the places."""
