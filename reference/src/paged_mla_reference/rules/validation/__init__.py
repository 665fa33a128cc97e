"""Every input that the rules forbid, and the error that it raises."""
