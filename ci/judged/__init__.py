"""Kernels of other projects put to ``paged-mla judge``, and the page of what was found.

    python -m ci.judged run --payload FOLDER --out out/judged --jobs 8
    python -m ci.judged page out/judged/results.json

``kernels.toml`` says what is judged, where each kernel is had, and how it is called. FOLDER has
their files, which this repository does not: module names are looked up in it, and paths that end in
``.py`` or ``.json`` are those of files in it.
"""
