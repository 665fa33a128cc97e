"""Steps of an engine: their inputs, their graphs, drafts."""
