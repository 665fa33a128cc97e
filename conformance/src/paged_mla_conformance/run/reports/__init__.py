"""What a run found: results, the report in JSON, HTML and JUnit XML, and the summary."""
