"""Early exit: which jobs end before their budget is spent, and why. Pure functions over loss curves.

`curves` holds what is judged, `policy` makes the preset a task file asks for, `paper`, `guarded` and `none` are the
presets, `detectors` and `gate` what they share. See docs/early-exit.md.
"""

from alto_core.early_exit.curves import Curve, PairedDifference, paired_difference, smoothed, validation_difference
from alto_core.early_exit.gate import first_verdict
from alto_core.early_exit.guarded import GuardedPolicy, GuardedRules
from alto_core.early_exit.none import NonePolicy
from alto_core.early_exit.paper import PaperPolicy, PaperRules
from alto_core.early_exit.policy import Policy, make_policy

__all__ = [
    "Curve",
    "GuardedPolicy",
    "GuardedRules",
    "NonePolicy",
    "PairedDifference",
    "PaperPolicy",
    "PaperRules",
    "Policy",
    "first_verdict",
    "make_policy",
    "paired_difference",
    "smoothed",
    "validation_difference",
]
