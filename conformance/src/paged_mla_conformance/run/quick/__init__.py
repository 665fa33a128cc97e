"""The quick verdict: few tests, chosen so that they find most known faults.

``table.json`` says which known faults each of its tests finds, and how long the reference takes for
it. Both are measured with every mutant in float32, or in bfloat16 if it shows in 16 bits alone.
Each run chooses from the tests that the backend under test declares.
"""
