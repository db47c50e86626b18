"""Benchmarks: one file per question, each with its baselines in the same run.

`python -m benchmarks` lists the questions; benchmarks/README.md says how to read the answers.
"""
