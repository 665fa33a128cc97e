"""Open-ended search for what breaks a backend; needs the extra ``conformance``.

``paged-mla fuzz --backend MODULE:FACTORY`` first asks the corpus, cases and
schedules that broke something once, then runs numbered schedules, then lets hypothesis draw
problems and steps, and drive the engine call by call, and shrink what fails. A file of the corpus
is called after what it shows, or after the mutant that it breaks.
"""
