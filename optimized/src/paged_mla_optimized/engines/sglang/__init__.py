"""The attention backend ``paged_mla`` of SGLang.

``registration`` contains the entry point. ``backend``, ``drafts`` and ``dispatch`` contain the code
that SGLang calls; they and ``registration`` are the only files that import SGLang. ``versions``
lists the differences between its releases.
"""
