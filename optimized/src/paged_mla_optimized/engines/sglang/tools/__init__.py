"""Commands for a machine with SGLang and a GPU: ``check`` generates, ``rate`` times.

They create a small DeepSeek-V3 with random weights and download nothing. SGLang runs a model in
other processes, so this package must be installed for them to find its entry point.
"""
