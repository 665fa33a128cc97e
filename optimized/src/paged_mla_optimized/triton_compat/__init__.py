"""The only place that touches private parts of Triton."""
