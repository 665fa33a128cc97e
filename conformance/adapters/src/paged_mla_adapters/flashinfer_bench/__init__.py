"""Definitions, workloads and solutions of FlashInfer-Bench."""
