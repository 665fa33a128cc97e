"""Commands for a machine with SGLang and a GPU: ``check`` generates, ``rate`` times.

Both make a small DeepSeek-V3 of random weights, so that nothing is downloaded. SGLang runs a model
in processes of its own: this package must be installed, so that they find its entry point.
"""
