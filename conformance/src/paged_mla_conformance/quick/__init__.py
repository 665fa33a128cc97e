"""The quick verdict: few tests, chosen so that they find most known faults.

``table.json`` says which known faults each of its tests finds, measured with every mutant in
float32, and how long the reference takes for it. Each run chooses from the tests that the backend
under test declares.
"""
