"""The classes that engines use, and the ops under ``torch.compile``."""
