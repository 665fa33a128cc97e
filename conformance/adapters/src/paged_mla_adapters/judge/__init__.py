"""``paged-mla judge``: test a kernel by its signature, without an adapter."""
