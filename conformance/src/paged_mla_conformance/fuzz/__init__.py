"""Open-ended search for schedules that break a backend; needs the extra ``fuzz`` (hypothesis).

``python -m paged_mla_conformance.fuzz --backend MODULE:FACTORY`` first runs numbered schedules,
then lets hypothesis drive the engine call by call and shrink what fails.
"""
