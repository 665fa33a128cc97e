"""The paged MLA conformance suite: proves a backend right, or says where it is wrong.

``paged-mla conformance --backend package.module:factory`` runs it.
"""
