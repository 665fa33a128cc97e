"""The copy of cached latents to dense tensors."""
