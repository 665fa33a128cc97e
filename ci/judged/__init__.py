"""Run ``paged-mla judge`` on kernels of other projects, and write the page of the results.

    python -m ci.judged run --payload FOLDER --out out/judged --jobs 8
    python -m ci.judged page out/judged/results.json

``kernels.toml`` lists the kernels with their sources and options. FOLDER contains their files,
which are not in this repository. It is on Python's path, and paths that end in ``.py`` or ``.json``
are relative to it.
"""
