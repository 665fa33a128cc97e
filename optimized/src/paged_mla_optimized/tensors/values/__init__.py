"""Checks of values on the host; for debugging, since they wait for the device."""
