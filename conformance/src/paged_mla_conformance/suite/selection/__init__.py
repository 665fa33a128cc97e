"""The selection of tests: their cases, sizes and types, and the reasons why some do not run."""
