"""The classes that an engine holds, and the ops under ``torch.compile``."""
