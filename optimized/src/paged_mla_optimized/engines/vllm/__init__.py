"""The attention backend ``PAGED_MLA`` of vLLM, ``CUSTOM`` before 0.32, and its prefill backend.

``registration`` is the entry point; ``backend``, ``builder``, ``impl`` and ``prefill`` are the
classes that vLLM asks for, and the only files that import it; ``versions`` says where its releases
differ.
"""
