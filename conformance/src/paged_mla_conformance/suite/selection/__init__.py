"""Which cases the suite tests, at which sizes and types, and why it skips the others."""
