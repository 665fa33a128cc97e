"""All code that depends on private parts of Triton."""
