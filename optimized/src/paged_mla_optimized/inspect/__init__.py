"""Looking at what happens: explanations, and checks of values."""
