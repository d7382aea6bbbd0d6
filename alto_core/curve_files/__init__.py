"""Loss curves of many jobs as Parquet files: what `alto curves` writes and `alto replay` reads, whoever made them.

`reading` is liberal in what it takes and exact in what it refuses; `columns` are the checks of single columns, `rows`
the optional file of row losses, `writing` makes both files. The format stands in docs/early-exit.md.
"""

from alto_core.curve_files.reading import RecordedJob, Recording, read_recording
from alto_core.curve_files.writing import CurveRows, write_recording

__all__ = ["CurveRows", "RecordedJob", "Recording", "read_recording", "write_recording"]
