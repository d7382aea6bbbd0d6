"""How much the constants matter: each of them changed alone, on recorded full sweeps.

    python benchmarks/early_exit_sensitivity.py CURVES/gsm8k-s0.parquet CURVES/chain_sum-s0.parquet ...

Warmup share 1 to 20 %, select ratio, regression window and patience, for `paper` and `guarded`. Writes
results/early_exit_sensitivity.csv, one line per sweep, policy and value.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bars import RESULTS
from early_exit_evidence import write_csv

from alto_core.curve_files import read_recording
from alto_core.replay import GATE_SETTING, replay_grid

WARMUPS = (0.01, 0.02, 0.05, 0.1, 0.2)
SELECT_RATIOS = (0.1, 0.25, 0.4, 0.5, 0.75)
GRID = {
    "paper": {
        GATE_SETTING: WARMUPS,
        "select_ratio": SELECT_RATIOS,
        "w": (2, 3, 5),
        "p_ovf": (1, 2, 4, 8),
        "p_div": (1, 2, 4),
    },
    "guarded": {
        GATE_SETTING: WARMUPS,
        "select_ratio": SELECT_RATIOS,
        "w": (2, 3, 5),
        "p_ovf": (2, 4, 8),
        "p_div": (1, 2, 4),
        "patience_fraction": (0.02, 0.05, 0.1, 0.2, 0.3),
        "num_standard_errors": (0, 1, 2),
        "tau_rise": (0.05, 0.2, 0.5, 1),
        "tie_ratio": (0, 0.1, 0.25, 0.5),
        "last_rung_fraction": (0.05, 0.1, 0.2, 0.4, 0.8),
        "rung_select_ratio": (0.4, 0.5, 0.55, 0.75),
    },
}
"""By preset, the values that each setting takes while all others stay as documented."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder of the table")
    options = parser.parse_args(arguments)
    rows = []
    for file in options.curves:
        recording = read_recording(file)
        for preset, settings in GRID.items():
            for name, values in settings.items():
                for summary in replay_grid(recording, [preset], {name: values}):
                    rows.append(
                        {
                            "sweep": file.stem,
                            "policy": preset,
                            "setting": name,
                            "value": summary.settings[name],
                            "saved": summary.samples_saved_share,
                            "val_ratio": summary.val_loss_ratio,
                            "regret": summary.regret,
                            "regret_standard_error": summary.regret_standard_error,
                            "top_quarter_coverage": summary.top_quarter_coverage,
                        }
                    )
                print(file.stem, preset, name, flush=True)
    write_csv(options.out / "early_exit_sensitivity.csv", rows)


if __name__ == "__main__":
    main()
