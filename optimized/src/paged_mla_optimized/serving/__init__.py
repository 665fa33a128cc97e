"""Steps of a serving loop: fixed inputs, CUDA graphs, drafts and events."""
