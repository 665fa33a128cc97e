"""Checks of values on the host; for debugging, since the host waits for the device."""
