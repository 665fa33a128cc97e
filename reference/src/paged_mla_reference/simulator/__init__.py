"""A simulated serving engine in NumPy. Its schedules are test cases for any backend.

The engine admits requests, chunks their prompts, mixes rows in a step, preempts requests, verifies
drafts and finishes requests, as real engines do. Every step becomes a
:class:`~paged_mla_shared.problem.Batch`. Its oracle is rule S-19: the output of a token depends
only on the tokens of its request, so it is known without running the schedule.

=================  ==============================================================
request, workloads requests and generated traffic; ``request_log`` reads real traffic
config, engine     the engine's configuration and its scheduler; ``sequence``,
                   ``block_pool`` and ``speculation`` are parts of the engine
step, batches      one step as rows of requests, and as arrays
model, dense       synthetic queries and latents, and the outputs that they must have
audit              a check that every slot that a step reads holds the right token
trace, trace_file  steps with their expected outputs, streamed, saved and loaded
coverage           the situations that a schedule reached
scenarios          named schedules; ``generated`` has random schedules
timeline           an HTML page of a schedule
=================  ==============================================================
"""
