"""The quick verdict: at most 80 tests that together find most known faults.

``table.json`` lists which known faults each test finds, and how long the reference takes for the
test. Both are measured in float32 with every mutant, or in bfloat16 for a mutant that is only wrong
in 16 bits. Each run chooses from the tests that the declaration of the backend covers.
"""
