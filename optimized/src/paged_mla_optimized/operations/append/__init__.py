"""The write of a step's latents to the paged cache."""
