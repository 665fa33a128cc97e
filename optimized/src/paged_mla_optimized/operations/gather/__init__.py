"""The read of cached latents."""
