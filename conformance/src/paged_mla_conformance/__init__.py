"""The paged MLA conformance suite: proves a backend right, or says where it is wrong.

``python -m paged_mla_conformance --backend package.module:factory`` runs it.
"""

__version__ = "0.1.0"
