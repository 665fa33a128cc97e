"""Programs for those who work on this package."""
