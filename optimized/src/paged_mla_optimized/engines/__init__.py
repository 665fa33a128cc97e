"""Engines that run this backend, one room each; a room needs its engine installed."""
