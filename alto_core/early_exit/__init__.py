"""Early exit: which jobs end before their budget is spent, and why. Pure functions over loss curves.

`curves` holds what is judged, `policy` makes the preset a task file asks for; `guarded`, `paper`, `asha`,
`successive_halving`, `median` and `none` are the presets, `detectors` and `gate` what they share. See
docs/early-exit.md.
"""

from alto_core.early_exit.asha import AshaPolicy, AshaRules
from alto_core.early_exit.curves import Curve, PairedDifference, paired_difference, smoothed, validation_difference
from alto_core.early_exit.gate import first_verdict
from alto_core.early_exit.guarded import GuardedPolicy, GuardedRules
from alto_core.early_exit.median import MedianPolicy, MedianRules
from alto_core.early_exit.none import NonePolicy
from alto_core.early_exit.paper import PaperPolicy, PaperRules
from alto_core.early_exit.policy import PRESETS, Policy, gate_fractions, make_policy
from alto_core.early_exit.successive_halving import HalvingRules, SuccessiveHalvingPolicy

__all__ = [
    "PRESETS",
    "AshaPolicy",
    "AshaRules",
    "Curve",
    "GuardedPolicy",
    "GuardedRules",
    "HalvingRules",
    "MedianPolicy",
    "MedianRules",
    "NonePolicy",
    "PairedDifference",
    "PaperPolicy",
    "PaperRules",
    "Policy",
    "SuccessiveHalvingPolicy",
    "first_verdict",
    "gate_fractions",
    "make_policy",
    "paired_difference",
    "smoothed",
    "validation_difference",
]
