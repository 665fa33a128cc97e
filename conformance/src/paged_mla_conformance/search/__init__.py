"""Search for steps and schedules that a backend fails; needs the extra ``conformance``.

``paged-mla fuzz --backend MODULE:FACTORY`` first runs the corpus: cases and schedules that failed
once. Then it runs numbered schedules and cases. Then hypothesis draws problems, steps and calls of
the engine, and shrinks failures. A file in the corpus has the name of the defect that it shows, or
of the mutant that fails it.
"""
