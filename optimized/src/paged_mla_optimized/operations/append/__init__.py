"""The paged scatter of latents."""
