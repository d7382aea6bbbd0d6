"""How good an adapter is on rows it never saw: loss per token, and the task's own metric, each with its interval.

`scoring` runs adapters over a split, all of them in shared batches. `metrics` picks the metric that a task file asks
for; those that compare texts are in `text_metrics`, those of likelihoods in `multiple_choice` and `preference`.
`intervals` says how sure a number is, and how sure a difference between two adapters is. Which rows are held out is
decided by `data`; which score picks the winner, by `selection`.
"""

from alto_core.evaluation.held_out import held_out_digest
from alto_core.evaluation.intervals import loss_difference, score_difference
from alto_core.evaluation.metrics import check_metric, text_metric
from alto_core.evaluation.scoring import SplitResult, TextCodec, evaluate_adapters, generate_answers, write_answers

__all__ = [
    "SplitResult",
    "TextCodec",
    "check_metric",
    "evaluate_adapters",
    "generate_answers",
    "held_out_digest",
    "loss_difference",
    "score_difference",
    "text_metric",
    "write_answers",
]
