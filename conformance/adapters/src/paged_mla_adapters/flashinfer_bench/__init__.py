"""Definitions, workloads and solutions of FlashInfer-Bench, written and read."""
