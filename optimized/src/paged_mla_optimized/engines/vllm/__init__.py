"""The attention backend ``PAGED_MLA`` of vLLM, ``CUSTOM`` before 0.32, and its prefill backend.

``registration`` contains the entry point. ``backend``, ``builder``, ``impl`` and ``prefill``
contain the classes that vLLM instantiates; they and ``registration`` are the only files that import
vLLM. ``versions`` lists the differences between its releases.
"""
