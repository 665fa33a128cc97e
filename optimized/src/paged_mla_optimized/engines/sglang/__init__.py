"""The attention backend ``paged_mla`` of SGLang.

``registration`` is the entry point; ``backend``, ``drafts`` and ``dispatch`` are what SGLang calls,
and the only files that import it; ``versions`` says where its releases differ.
"""
