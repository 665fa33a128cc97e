"""The attention backend ``CUSTOM`` of vLLM, and its prefill backend of the same name.

``registration`` is the entry point; ``backend``, ``builder``, ``impl`` and ``prefill`` are the
classes that vLLM asks for, and the only files that import it; ``versions`` says where its releases
differ.
"""
