"""The paged MLA conformance suite: it checks a backend and reports where the backend is wrong.

``paged-mla conformance --backend package.module:factory`` runs it.
"""
