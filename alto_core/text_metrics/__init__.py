"""Metrics that compare a generated answer with the reference of its row. One file holds one metric.

They know texts alone: neither task files, which name them (`config`), nor rows and adapters (`evaluation`).
"""

from alto_core.text_metrics.registry import TEXT_METRICS, TextMetric

__all__ = ["TEXT_METRICS", "TextMetric"]
