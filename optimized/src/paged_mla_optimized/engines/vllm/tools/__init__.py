"""Commands for a machine with vLLM and a GPU: ``check`` generates, ``rate`` and ``prefill`` time.

They create a small DeepSeek-V3 with random weights and download nothing.
"""
