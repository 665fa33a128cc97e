"""Commands for developers of this package."""
