"""The results of a run: the report in JSON, HTML and JUnit XML, and the summary on the screen."""
