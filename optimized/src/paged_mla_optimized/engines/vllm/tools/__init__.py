"""Commands for a machine with vLLM and a GPU: ``check`` generates, ``rate`` and ``prefill`` time.

Both make a small DeepSeek-V3 of random weights, so that nothing is downloaded.
"""
