"""The device, kernel launches, and the log."""
