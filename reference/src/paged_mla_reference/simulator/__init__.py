"""A serving engine in NumPy, whose schedules are test cases for any backend.

Requests arrive, are admitted, chunked, mixed, preempted, drafted for and finished as engines
do it. Every step becomes a :class:`~paged_mla_shared.problem.Batch`, and rule S-19 is its
oracle: a token's answer follows from the tokens of its request alone, so that it is known
without running the schedule.

=================  ==============================================================
request, workloads what is asked of the engine; ``request_log`` reads real traffic
config, engine     how the engine schedules; ``sequence``, ``block_pool`` and
                   ``speculation`` are its parts
step, batches      one step as rows of requests, and as arrays
model, dense       made-up queries and latents, and the answers they must get
audit              is the right token behind every slot that a step reads
trace, trace_file  steps with their answers, streamed, saved and loaded
coverage           which situations a schedule reached
scenarios          named and generated schedules
timeline           a schedule as a page to look at
=================  ==============================================================
"""
