"""Code that the commands for vLLM and SGLang share: a small random model and comparisons."""
